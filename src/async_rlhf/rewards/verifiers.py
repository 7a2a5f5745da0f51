"""Rewards that check a response against its row's reference answer. No model is asked.

gsm8k: 1.0 where the final answer is that of the row's column `answer`, else 0.0. Responses and answers are in the form of the GSM8K
data set, whose solutions end with `#### N` (Cobbe et al. 2021, arXiv 2110.14168).
"""

import re
from decimal import Decimal

from async_rlhf.config import require
from async_rlhf.rewards.base import Sample

NUMBER = re.compile(
    r"""(?P<sign> [-+]?\$? | \$[-+] )                                  # -3, -$3, $-3
        (?P<digits> [0-9]{1,3}(?:,[0-9]{3})+ | [0-9]+ | (?=\.[0-9]) )  # commas stand before each three digits, or nowhere
        (?P<fraction> \.[0-9]+ )?
        \ ?[%$]? [.,;:!]* (?=\s|$)                                     # 3/4, 12:30 and 1e5 are other numbers than 3, 12 and 1
    """,
    re.VERBOSE,
)


def gsm8k(samples: list[Sample]) -> list[float]:
    """One score a sample: 1.0 where the number after the last `####` of the response equals the row's, compared as numbers.

    A response without `####`, or without a number right after it, scores 0.0.

    Raises:
        UserError: a row without a readable reference answer; it names the row's question.
    """
    return [float(after_hashes(sample.response) == reference(sample)) for sample in samples]


def reference(sample: Sample) -> Decimal:
    """The number that the row's column `answer` ends with."""
    answer = sample.columns.get("answer")
    value = after_hashes(answer) if isinstance(answer, str) else None
    question = sample.columns.get("question", sample.prompt)
    require(
        value is not None, f"gsm8k: no number after '####' in column 'answer', {answer!r:.200}, in the row of question {question!r:.200}"
    )
    return value


def after_hashes(text: str) -> Decimal | None:
    """The number that follows the last `####`; None where there is none. Words may follow it."""
    _, hashes, rest = text.rpartition("####")
    return read_number(rest) if hashes else None


def read_number(text: str) -> Decimal | None:
    """The number that a text begins with, as exact as it is written: $ and % signs and thousands separators are left out."""
    match = NUMBER.match(text.strip().replace("\N{MINUS SIGN}", "-"))
    if not match:
        return None
    sign = "-" if "-" in match["sign"] else ""
    return Decimal(f"{sign}{match['digits'].replace(',', '')}{match['fraction'] or ''}")
