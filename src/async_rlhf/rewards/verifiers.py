r"""Verifiers: rewards that check a response against a rule or against its row's reference. No model is asked.

    reward: [{function: async_rlhf.rewards.verifiers:gsm8k, arguments: {forms: [hashes, boxed]}}]

gsm8k    1.0 where the final number is that of the row's answer; the form of the GSM8K data set (Cobbe et al. 2021, arXiv 2110.14168)
math     1.0 where the final expression equals the row's answer, by math-verify
regex    1.0 where a pattern is found
length   1.0 at a length or in a band of lengths, less beside it
format   1.0 where tags or sections stand there in order
rouge    F1 of n-grams or of the longest common subsequence with the data set's own completion (Lin 2004)

Each returns one score a sample, and refuses arguments that mean nothing with a `UserError`, before the run.
"""

import functools
import itertools
import re
import threading
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from async_rlhf.config import UserError, require
from async_rlhf.rewards.answers import FORMS, final_number, last_box, read_number
from async_rlhf.rewards.base import Sample
from async_rlhf.rewards.function import checks_arguments

LENGTH_UNITS: dict[str, Callable[[Sample], int]] = {
    "characters": lambda sample: len(sample.response),
    "words": lambda sample: len(sample.response.split()),
    "tokens": lambda sample: len(sample.response_ids) - sample.finished,  # without the one that ended it
}
ROUGE_KINDS = ("rouge1", "rouge2", "rougeL")
MATH_SECONDS = 5  # for reading one expression, and for comparing two


@checks_arguments
def gsm8k(samples: list[Sample], forms: Sequence[str] = ("hashes",), column: str = "answer") -> list[float]:
    r"""1.0 where the response's final number is the row's, compared as exact numbers; 0.0 elsewhere, also where there is no number.

    `forms` are the places where a final number is looked for: `hashes`, after the last `####`; `boxed`, in the last `\boxed{}`;
    `last_number`, the last number of the text. The first whose mark the response has decides. By default the data set's own form alone,
    `####`, is an answer, as in the paper: any number in passing would be one under `last_number`.

    Raises:
        UserError: a row without a readable answer in `column`; it names the row's question.
    """
    listed = isinstance(forms, Sequence) and not isinstance(forms, str) and forms and all(form in FORMS for form in forms)
    require(listed, f"forms {forms!r}: a list of {', '.join(FORMS)} is needed")
    _check_column(column)
    return [float(final_number(sample.response, forms) == reference_number(sample, column)) for sample in samples]


def reference_number(sample: Sample, column: str = "answer") -> Fraction:
    """The number in a column of the row: after `####` or in a box where it has one, else the number that is all there is."""
    answer = sample.columns.get(column)
    if isinstance(answer, str):
        marked = [form for form in ("hashes", "boxed") if FORMS[form][0] in answer]
        value = final_number(answer, marked) if marked else read_number(answer)
    else:
        is_number = isinstance(answer, int | float | Decimal) and not isinstance(answer, bool)
        value = Fraction(str(answer)) if is_number and answer == answer and abs(answer) != float("inf") else None
    require(value is not None, f"gsm8k: no number in column {column!r}, {answer!r:.200}, in the row of question {_question(sample)}")
    return value


@checks_arguments
def math(samples: list[Sample], boxed: bool = False, column: str = "answer") -> list[float]:
    r"""1.0 where the response's final expression equals the row's by math-verify: numbers, fractions, roots, sets, intervals, equations,
    in LaTeX or plain. With `boxed` it must stand in `\boxed{}`; else math-verify looks for it: after "answer is", in a box, in
    `$…$`, at the end. For numbers alone `gsm8k` is stricter and faster.

    Works in the main thread only, where math-verify can end what takes longer than `MATH_SECONDS`; such a sample scores 0.0.

    Raises:
        UserError: math-verify is not installed; a row without a readable answer in `column`.
        RuntimeError: called in another thread.
    """
    require(isinstance(boxed, bool), f"boxed {boxed!r}: true or false is needed")
    _check_column(column)
    try:
        from math_verify import verify
    except ImportError as error:
        raise UserError("math needs the package math-verify: pip install math-verify") from error
    if samples and threading.current_thread() is not threading.main_thread():
        raise RuntimeError("math: expressions are compared within a time limit, which works in the main thread only")

    def score(sample: Sample) -> float:
        answer = sample.columns.get(column)
        reference = _parse_reference(answer) if isinstance(answer, str) else ()
        require(reference, f"math: no expression in column {column!r}, {answer!r:.200}, in the row of question {_question(sample)}")
        said = sample.response
        if boxed:
            said = last_box(said)
            if said is None:
                return 0.0
            said = rf"\boxed{{{said}}}"
        return float(verify(list(reference), _parse(said), timeout_seconds=MATH_SECONDS))

    return [score(sample) for sample in samples]


@functools.lru_cache(4096)
def _parse_reference(answer: str) -> tuple:
    """A reference as it is where it has a box or LaTeX's marks of mathematics; else it is one expression, and goes into a box."""
    answer = answer.rpartition("####")[2].strip()
    marked = re.search(r"\\boxed|\$.*\$|\\\(|\\\[", answer, re.DOTALL)
    return tuple(_parse(answer if marked else rf"\boxed{{{answer}}}")) if answer else ()


def _parse(text: str) -> list:
    from math_verify import parse

    return parse(text, parsing_timeout=MATH_SECONDS)


@checks_arguments
def regex(samples: list[Sample], pattern: str, full: bool = False) -> list[float]:
    """1.0 where Python's `re` finds the pattern in the response, or, with `full`, where the whole response is one match."""
    require(isinstance(full, bool), f"full {full!r}: true or false is needed")
    require(isinstance(pattern, str) and pattern, f"pattern {pattern!r}: a regular expression is needed")
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UserError(f"pattern {pattern!r}: {error}") from error
    find = compiled.fullmatch if full else compiled.search
    return [float(find(sample.response) is not None) for sample in samples]


@checks_arguments
def length(
    samples: list[Sample],
    target: float | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    unit: str = "words",
    slack: float = 0,
) -> list[float]:
    """1.0 at `target`, or from `minimum` to `maximum`; outside it falls to 0.0 in a straight line over `slack` units.

    `unit`: characters, words (parted by white space), or tokens of the policy without the one that ends a response.
    """
    numbers = {"target": target, "minimum": minimum, "maximum": maximum, "slack": slack}
    for name, value in numbers.items():
        good = value is None or (isinstance(value, int | float) and not isinstance(value, bool) and value >= 0)
        require(good, f"{name} {value!r}: a number of 0 or more is needed")
    require(unit in LENGTH_UNITS, f"unit {unit!r}: one of {', '.join(LENGTH_UNITS)} is needed")
    require(slack is not None, "slack null: a number of 0 or more is needed")
    banded = minimum is not None or maximum is not None
    require(banded != (target is not None), "target, or minimum and maximum or one of them, is needed, and not both")
    low, high = (minimum or 0, float("inf") if maximum is None else maximum) if banded else (target, target)
    require(low <= high, f"minimum {minimum} is above maximum {maximum}")

    def score(sample: Sample) -> float:
        if unit == "tokens" and sample.response and not sample.response_ids:
            raise ValueError("length in tokens: the sample has text alone; take characters or words for relative or for pairs")
        long = LENGTH_UNITS[unit](sample)
        distance = max(low - long, long - high, 0)
        return max(0.0, 1 - distance / slack) if slack else float(distance == 0)

    return [score(sample) for sample in samples]


@checks_arguments
def format(samples: list[Sample], tags: Sequence[str] = (), sections: Sequence[str] = (), only: bool = False) -> list[float]:
    """1.0 where every part stands there once, in order, and holds something; else 0.0.

    `tags: [think, answer]` are `<think>…</think>` and then `<answer>…</answer>`. `sections: ["Steps:", "Answer:"]` are headings that begin
    a line; a section goes on to the next heading. With `only`, nothing but white space stands outside the parts.
    """
    for name, value in (("tags", tags), ("sections", sections)):
        listed = isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(one, str) and one.strip() for one in value)
        require(listed, f"{name} {value!r}: a list of names is needed")
        require(len(set(value)) == len(value), f"{name} {list(value)}: one stands there twice")
    require(bool(tags) != bool(sections), "tags or sections are needed, and not both")
    require(isinstance(only, bool), f"only {only!r}: true or false is needed")
    if tags:
        marks = [re.compile(re.escape(mark)) for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    else:
        marks = [re.compile(rf"^[ \t]*{re.escape(section)}", re.MULTILINE) for section in sections]

    def score(sample: Sample) -> float:
        found = [list(mark.finditer(sample.response)) for mark in marks]
        if any(len(matches) != 1 for matches in found):
            return 0.0
        spans = [(0, 0), *(matches[0].span() for matches in found), (len(sample.response),) * 2]
        if any(end > start for (_, end), (start, _) in itertools.pairwise(spans)):
            return 0.0
        before, *between = [sample.response[end:start].strip() for (_, end), (start, _) in itertools.pairwise(spans)]
        inside, outside = (between[::2], [before, *between[1::2]]) if tags else (between, [before])
        return float(all(inside) and not (only and any(outside)))

    return [score(sample) for sample in samples]


@checks_arguments
def rouge(samples: list[Sample], kind: str = "rougeL", stem: bool = False) -> list[float]:
    """F1 with the data set's own completion: `rouge1` of words, `rouge2` of pairs of words, `rougeL` of the longest common subsequence.
    `stem` cuts English endings off first.

    Raises:
        UserError: a sample whose row has no completion.
    """
    require(kind in ROUGE_KINDS, f"kind {kind!r}: one of {', '.join(ROUGE_KINDS)} is needed")
    require(isinstance(stem, bool), f"stem {stem!r}: true or false is needed")
    from rouge_score.rouge_scorer import RougeScorer  # loads all of nltk

    scorer = RougeScorer([kind], use_stemmer=stem)

    def score(sample: Sample) -> float:
        require(
            sample.reference is not None,
            f"rouge: no completion in the row of question {_question(sample)}: set completion_column or completion_template",
        )
        return scorer.score(sample.reference, sample.response)[kind].fmeasure

    return [score(sample) for sample in samples]


def _check_column(column: Any) -> None:
    require(isinstance(column, str) and column, f"column {column!r}: the name of a column is needed")


def _question(sample: Sample) -> str:
    return f"{sample.columns.get('question', sample.prompt)!r:.200}"
