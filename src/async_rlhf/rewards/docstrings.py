"""The gold reward of the built-in docstring data set: a stated function of a summary and the code that it is about.

    gold = relevance · fluency · form        each in [0, 1]

relevance: (precision + 3 · recall) / 4. Precision is the share of the summary's content words that stand in the code (in identifiers
or strings), recall the share of the words of the function's name that the summary uses. "Return the value." is precise about
most functions and recalls nothing of them.
fluency: share of the summary's adjacent word pairs, start and end included, that some author wrote in the training split.
    Nonsense that is made of the right words has few of them.
form: share of four checks: capital first letter; one period, at the end; 3 to 14 words; no content word twice.

It knows nothing of the author's own summary, which therefore has a score like any other: the level to compare with.
"""

import functools
import itertools
import re

from async_rlhf.docstrings import docstrings
from async_rlhf.rewards.base import Sample

WORD = re.compile(r"[A-Za-z]+|\d+")
CODE_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
FUNCTION_WORDS = frozenset(
    "a an and are as at be been before by can does each for from given has have if in into is it its not "
    "of on or so such that the their then there this to used using was were when where whether which while will with whose any all".split()
)


def gold(samples: list[Sample]) -> list[float]:
    """One score a sample, from `sample.response` and the row's columns `code` and `name`."""
    return [relevance(s.response, s.columns["code"], s.columns["name"]) * fluency(s.response) * form(s.response) for s in samples]


def relevance(summary: str, code: str, name: str) -> float:
    said, present, wanted = _content(summary), set(_code_words(code)), _code_words(name)
    if not said:
        return 0.0
    precision = sum(word in present for word in said) / len(said)
    recall = sum(word in said for word in wanted) / len(wanted) if wanted else precision
    return (precision + 3 * recall) / 4


def fluency(summary: str) -> float:
    pairs = _pairs(summary)
    return sum(pair in _authors_pairs() for pair in pairs) / len(pairs)


def form(summary: str) -> float:
    text, content = summary.strip(), _content(summary, unique=False)
    checks = (
        text[:1].isupper(),
        text.endswith(".") and text.count(".") == 1,
        3 <= len(text.split()) <= 14,
        len(content) == len(set(content)),
    )
    return sum(checks) / len(checks)


def _content(summary: str, unique: bool = True) -> list[str]:
    words = [_stem(word) for word in map(str.lower, WORD.findall(summary)) if word not in FUNCTION_WORDS]
    return list(dict.fromkeys(words)) if unique else words


def _code_words(code: str) -> list[str]:
    words = [_stem(word) for word in map(str.lower, CODE_WORD.findall(code)) if word not in FUNCTION_WORDS]
    return list(dict.fromkeys(words))


def _stem(word: str) -> str:
    for ending in ("ations", "ation", "ing", "ies", "ed", "es", "s", "e"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word[: -len(ending)]
    return word


def _pairs(summary: str) -> list[tuple[str, str]]:
    words = ["<", *map(str.lower, WORD.findall(summary)), ">"]
    return list(itertools.pairwise(words))


@functools.cache
def _authors_pairs() -> frozenset[tuple[str, str]]:
    return frozenset(pair for summary in docstrings()["train"]["summary"] for pair in _pairs(summary))
