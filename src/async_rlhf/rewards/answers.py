r"""The number that a text gives as its answer, exact: as fractions, so that 0.5, 1/2 and 50/100 are one number.

What stands around a number and leaves it what it is, is read over: currency signs, thousands separators, `%`, units, the marks of Markdown
and LaTeX. What makes it another number counts: 1/2, 1 1/2, 1e3, 2 \times 10^3, 5 million. What is no one number is none: 12:30, 10-12,
5 or 6, 5 + 3, 1,00, 5k, 5x. After an expression, the number behind its last `=` is read.
"""

import re
import unicodedata
from collections.abc import Callable, Sequence
from fractions import Fraction

LONGEST = 1000  # characters that an answer is looked for in; a number that fills them is none
SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
UNITS = (
    *("km/h", "km", "cm", "mm", "m/s", "mph", "kph", "mi", "m", "ft", "in", "yd", "kg", "mg", "g", "lbs?", "oz", "ml", "mL", "l", "L"),
    *("hrs?", "h", "mins?", "sec", "s", "am", "pm", "a\\.m\\.", "p\\.m\\.", "kWh", "°[CF]?", "¢", "cents?", "st", "nd", "rd", "th"),
)
CURRENCY = r"(?:(?:US|A|C)?\$++|[€£¥₹]|USD|EUR|GBP|Rs\.?)"
WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})++(?![0-9])|[0-9]++)"  # commas stand before each three digits, or nowhere
NUMBER = re.compile(
    rf"""(?<![\w.,/^±-])(?<![0-9]:)                                 # not in the midst of something else
        (?:(?P<sign>[-+]){CURRENCY}?|{CURRENCY}\ ?(?P<inner>[-+]?)|)
        (?:(?:(?P<whole>{WHOLE})\ )?(?P<top>{WHOLE})\ ?/\ ?(?P<bottom>[0-9]++)(?![0-9.,]*[0-9])
          |(?P<digits>{WHOLE}(?:\.[0-9]++)?|\.[0-9]++)
           (?:[eE](?P<e>[-+]?[0-9]{{1,3}})|\ ?[×x*]\ ?10\^\{{?(?P<power>[-+]?[0-9]{{1,3}})\}}?)?
        )
        (?P<scale>(?:\ (?:{"|".join(SCALES)})s?\b)*)
        (?:\ ?[%€£¥₹]|\ ?\$++|{"|".join(UNITS)})?
        (?=[.,;:!?]*(?:[\s)\]}}>"'”’]|</|$)|=)                      # so 12:30, 1.2.3 and 5k are no numbers
    """,
    re.VERBOSE,
)
ANOTHER = re.compile(rf"[.,;]?\s*(?:[,;|&+*/×÷^±~–—x-]|and|or|to)\s*{CURRENCY}?[-+]?\.?[0-9]")  # 5, 6; 5 or 6; 5 + 3
WRAPPER = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mathit|boxed|fbox)\s*\{([^{}]*)\}")
LATEX_FRACTION = re.compile(r"([0-9]?)\\[dt]?frac\s*(?:\{([^{}]*)\}|([0-9]))\s*(?:\{([^{}]*)\}|([0-9]))")
PLAIN = [
    (r"\\[!,]|\\left|\\right|\*\*|__|`", ""),
    (r"\\\$", "$"),
    (r"\\%", "%"),
    (r"\{,\}", ","),
    (r"\\(?:times|cdot)(?![a-z])", "×"),
    (r"\^\{?\\circ\}?|\\degree", "°"),
    (r"\\[();:\[\] ]|~(?![0-9])|\\quad", " "),
    (r"(?<=[0-9])[\u00a0\u2009\u202f](?=[0-9]{3}(?![0-9]))", ""),  # thousands, as some languages part them
]


def final_number(text: str, forms: Sequence[str]) -> Fraction | None:
    """The answer in the first of the `forms` (keys of `FORMS`) whose mark the text has; None where it has none, or no number there."""
    form = next((form for form in forms if FORMS[form][0] in text), None)
    return FORMS[form][1](text) if form else None


def after_hashes(text: str) -> Fraction | None:
    """The number that follows the last `####`. Words may follow it."""
    _, hashes, rest = text.rpartition("####")
    return read_number(rest) if hashes else None


def in_box(text: str) -> Fraction | None:
    r"""The number in the last `\boxed{}`."""
    content = last_box(text)
    return None if content is None else read_number(content)


def last_box(text: str) -> str | None:
    r"""What stands in the last `\boxed{}`, braces within it included; None where there is none that closes."""
    _, box, rest = text.rpartition(r"\boxed{")
    depth = 1
    for i, character in enumerate(rest if box else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:i]
    return None


def read_number(text: str) -> Fraction | None:
    """The number that a text begins with, or the one behind the last `=` of the expression that it begins with."""
    line = next(iter(_plain(text.strip()[:LONGEST]).strip().splitlines()), "")
    if re.match(r"[-+$]*[1-9][0-9]{0,2}(?: [0-9]{3})+(?![0-9])", line):
        line = re.sub(r"(?<=[0-9]) (?=[0-9]{3}(?![0-9]))", "", line)  # 1 000 000
    match = NUMBER.match(line)
    if match and not ANOTHER.match(line, match.end()):
        return _value(match)
    return read_number(line.rpartition("=")[2]) if "=" in line else None


def last_number(text: str) -> Fraction | None:
    """The last number of a text, wherever it stands in its last `LONGEST` characters."""
    end = text if len(text) <= LONGEST else re.sub(r"^\S+\s", "", text[-LONGEST:])  # without the half of a number
    values = [value for match in NUMBER.finditer(_plain(end)) if (value := _value(match)) is not None]
    return values[-1] if values else None


FORMS: dict[str, tuple[str, Callable[[str], Fraction | None]]] = {
    "hashes": ("####", after_hashes),
    "boxed": (r"\boxed{", in_box),
    "last_number": ("", last_number),
}


def _value(match: re.Match) -> Fraction | None:
    if len(match[0]) >= LONGEST:
        return None
    if match["top"]:
        top, bottom, whole = (int((match[name] or "0").replace(",", "")) for name in ("top", "bottom", "whole"))
        value = whole + Fraction(top, bottom) if bottom else None
    else:
        value = Fraction(match["digits"].replace(",", "")) * Fraction(10) ** int(match["e"] or match["power"] or 0)
    if value is None:
        return None
    for scale in match["scale"].split():
        value *= SCALES[scale.removesuffix("s")]
    return -value if "-" in (match["sign"], match["inner"]) else value


def _plain(text: str) -> str:
    """Without the marks of Markdown and LaTeX, fractions as a/b."""
    text = text.replace("\N{MINUS SIGN}", "-")
    text = re.sub("[¼-¾⅐-⅞]", lambda match: f" {unicodedata.normalize('NFKC', match[0])} ".replace("\N{FRACTION SLASH}", "/"), text)
    for pattern, replacement in PLAIN:
        text = re.sub(pattern, replacement, text)
    text = LATEX_FRACTION.sub(_slash, text)
    while (inner := WRAPPER.sub(r" \1 ", text)) != text:
        text = inner
    return text


def _slash(match: re.Match) -> str:
    before, *parts = match.groups()
    top, bottom = (part for part in parts if part is not None)
    return f"{before} {top}/{bottom}" if before else f"{top}/{bottom}"
