"""A language model as judge, asked over the chat completions of an OpenAI-compatible server: `vllm serve`, Ollama and others.

It gives each response a score or a label, or says of two responses to a prompt which is better. Pairwise, every pair of a prompt's
samples is asked in both orders, n · (n − 1) questions for n samples, and

    score(i) = mean over the others j and both orders of P(i beats j)

so that a judge who prefers a place, first or second, adds the same to all of them (Zheng et al. 2023, arXiv 2306.05685).
"""

import itertools
import json
import logging
import math
import string
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from async_rlhf.config import UserError, require, setting
from async_rlhf.data import template_columns
from async_rlhf.rewards.base import RewardContext, Sample
from async_rlhf.rewards.servers import SHOWN, Servers, ServerSettings

TOP_TOKENS = 20  # most that OpenAI and, by default, vLLM give
MODES = {  # the question and what is shown, where no template is set
    "score": "Rate the response to the prompt. The highest number is best.\n\nPrompt:\n{prompt}\n\nResponse:\n{response}",
    "labels": "Which label fits the response to the prompt best?\n\nPrompt:\n{prompt}\n\nResponse:\n{response}",
    "pairwise": "Which response to the prompt is better?\n\nPrompt:\n{prompt}\n\nResponse A:\n{response_a}\n\nResponse B:\n{response_b}",
}
ANSWER = "\n\nPossible answers: {answers}. Say nothing else."
ANSWER_IN_JSON = '\n\nPossible answers: {answers}. Answer as JSON: {{"answer": …}}'
OWN_FIELDS = {"prompt", "response", "response_a", "response_b", "reference", "answers"}

logger = logging.getLogger(__name__)


@dataclass
class JudgeSettings(ServerSettings):
    """A language model behind an OpenAI-compatible server that judges."""

    judge: list[str] = setting([], "Base URL of the server, /v1 included; several share the questions.")
    model: str | None = setting(None, "Name of the model there. Default: the only one that the server has.")
    mode: Literal["score", "labels", "pairwise"] = setting(
        "score",
        "score: a number of `scale`; labels: one of `labels`; pairwise: which of two samples of a prompt is better, asked of every "
        "pair in both orders, the score being the mean probability to win.",
    )
    read: Literal["json_schema", "choice", "logprobs"] = setting(
        "json_schema",
        'How the answer is read. json_schema: `{"answer": …}`, constrained by `response_format`; choice: the bare answer, constrained by '
        "vLLM's `structured_outputs`; logprobs: the mean of the answers' values, by the probabilities of the first token.",
    )
    template: str | None = setting(
        None,
        "The question, or a file that holds it: text with the fields {prompt}, {response} (pairwise {response_a} and {response_b}), "
        "{reference}, {answers} and any column of the row. Braces that are meant are doubled. Default: a plain one for each mode.",
    )
    system_prompt: str | None = setting(None, "System turn before the question.")
    scale: list[float] = setting([1.0, 5.0], "Lowest and highest score. Between whole ones only whole scores are asked for.")
    labels: dict = setting({}, "Labels and their values. Pairwise: the value is the first response's share of the win; default A: 1, B: 0.")
    min_probability: float = setting(
        0.1, "For logprobs: least probability of all answers together; with less, the first token is no answer."
    )
    on_unparsed: str = setting(
        "error", "What becomes of an answer that cannot be read: error, or the number that it counts as, for both samples of a pair."
    )
    temperature: float = setting(0.0, "Temperature of the judge.")
    max_tokens: int = setting(32, "Most tokens of an answer; for logprobs it is 1.")
    request: dict = setting({}, "Further fields of every request, as the server takes them; null leaves one of the judge's out.")

    def __post_init__(self):
        super().__post_init__()
        pairwise = self.mode == "pairwise"
        require(self.temperature >= 0, f"temperature {self.temperature}: 0 or more")
        require(self.max_tokens >= 1, f"max_tokens {self.max_tokens}: at least 1")
        in_order = len(self.scale) == 2 and -math.inf < self.scale[0] < self.scale[1] < math.inf
        require(in_order, f"scale {self.scale}: the lowest and the highest score are needed")
        require(not self.labels or self.mode != "score", "labels have no meaning in mode score: set mode labels or pairwise")
        require(self.labels or self.mode != "labels", "labels is not set: mode labels needs labels and their values")
        for label, value in self.labels.items():
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            require(number, f"labels: {label} has the value {value!r}; a number is needed")
            require(not pairwise or 0 <= value <= 1, f"labels: {label} has the value {value}; pairwise it is a share of a win, 0 to 1")
            yes_or_no = label in ("true", "false")
            require(not yes_or_no, f"labels: {label}: YAML makes that of a bare yes, no, on, off, true or false; put the label in quotes")
        require(not self.labels or len(set(self.labels.values())) > 1, f"labels {self.labels}: all of one value; they say nothing")
        self._check_reading()
        floor = self.floor
        require(floor is None or math.isfinite(floor), f"on_unparsed {self.on_unparsed}: error or a finite number")
        require(not pairwise or floor is None or 0 <= floor <= 1, f"on_unparsed {floor}: pairwise it is a share of a win, 0 to 1")
        require(not (pairwise and self.relative), "relative: a pairwise judge has no score of the data set's completion alone")

    def _check_reading(self) -> None:
        if self.read == "json_schema":
            return
        few = self.mode != "score" or (self.whole and self.scale[1] - self.scale[0] <= 100)
        require(few, f"scale {self.scale}: read {self.read} takes whole scores, 100 apart at most; read json_schema takes any")
        if self.read == "logprobs":
            for first, second in itertools.permutations(self.choices, 2):
                alike = second.startswith(first)
                require(not alike, f"read logprobs sees one token: {first} and {second} begin alike; take other labels or a shorter scale")
            require(0 < self.min_probability <= 1, f"min_probability {self.min_probability}: above 0, at most 1")

    # -- what follows from the settings ---------------------------------------------------------------------------------------

    @property
    def compares(self) -> bool:
        return self.mode == "pairwise"

    @property
    def reads_reference(self) -> bool:
        return self.relative or "reference" in template_columns(self.question)

    @property
    def columns(self) -> set[str]:
        return template_columns(self.question) - OWN_FIELDS

    @property
    def floor(self) -> float | None:
        """What an answer counts as that cannot be read; None: it is an error."""
        try:
            return None if self.on_unparsed == "error" else float(self.on_unparsed)
        except ValueError as error:
            raise UserError(f"on_unparsed {self.on_unparsed!r}: error or a number") from error

    @property
    def choices(self) -> dict[str, float]:
        """The possible answers and their values; of a scale the whole ones."""
        if self.mode != "score":
            return {label: float(value) for label, value in (self.labels or {"A": 1, "B": 0}).items()}
        low, high = map(int, self.scale)
        return {str(score): float(score) for score in range(low, high + 1)}

    @property
    def whole(self) -> bool:
        """Whether only whole scores are asked for."""
        return all(float(end).is_integer() for end in self.scale)

    @property
    def question(self) -> str:
        """The template as text.

        Raises:
            UserError: no such file.
        """
        if self.template is None:
            return MODES[self.mode] + (ANSWER_IN_JSON if self.read == "json_schema" else ANSWER)
        if "{" in self.template:
            return self.template
        path = Path(self.template).expanduser()
        require(path.is_file(), f"template {self.template!r}: no field such as {{response}} in it, and no such file")
        return path.read_text(encoding="utf-8")

    @property
    def answers(self) -> str:
        """The field {answers} of a template."""
        return "{:g} to {:g}".format(*self.scale) if self.mode == "score" else ", ".join(self.choices)

    @property
    def constraint(self) -> dict[str, Any]:
        """The fields of a request that bring the answer into the form that is read."""
        if self.read == "logprobs":
            return {"logprobs": True, "top_logprobs": TOP_TOKENS}
        if self.read == "choice":
            return {"structured_outputs": {"choice": list(self.choices)}}
        if self.mode == "score":
            low, high = map(int, self.scale) if self.whole else self.scale
            answer = {"type": "integer" if self.whole else "number", "minimum": low, "maximum": high}
        else:
            answer = {"type": "string", "enum": list(self.choices)}
        schema = {"type": "object", "properties": {"answer": answer}, "required": ["answer"], "additionalProperties": False}
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": schema}}}

    # -- the kind ---------------------------------------------------------------------------------------------------------------

    def default_name(self) -> str:
        return "judge"

    def check(self) -> None:
        self.check_servers(self.judge)
        fields = template_columns(self.question)
        nameless = any(name == "" for _, name, _, _ in string.Formatter().parse(self.question))
        require(not nameless, "template: a field without a name, {}; double the braces that are meant")
        wanted, other = ("response",), ("response_a", "response_b")
        if self.compares:
            wanted, other = other, wanted
        for name in wanted:
            require(name in fields, f"template: the field {{{name}}} is needed in mode {self.mode}")
        for name in other:
            require(name not in fields, f"template: mode {self.mode} has no field {{{name}}}; it has {', '.join(wanted)}")

    def open(self, context: RewardContext) -> "Judge":
        return Judge(self)


class Unreadable(ValueError):
    """An answer that is none of the possible ones."""


class Judge:
    """Asks the judge about samples. `observed` says how it went since it was asked last."""

    collective = False

    def __init__(self, settings: JudgeSettings):
        self.settings, self.servers = settings, Servers(settings.judge, settings)
        self.model = settings.model or self._only_model()
        self._question, self._fields = settings.question, template_columns(settings.question)
        self._observed: dict[str, list[float]] = defaultdict(list)

    def __call__(self, samples: Sequence[Sample]) -> torch.Tensor:
        """
        Raises:
            UserError: no server answers, an answer that cannot be read where that is an error, a field of the template that a row lacks,
                or, pairwise, a prompt with one sample.
        """
        if self.settings.compares:
            return self._compare(samples)
        floor = self.settings.floor
        values = self._ask([self._fill(sample, response=sample.response) for sample in samples])
        return torch.tensor([floor if value is None else value for value in values])

    def observed(self) -> dict[str, list[float]]:
        """Of each question since this was last called: `unparsed`, whether its answer could not be read; pairwise, where it could,
        `first_wins`, the win of the response that stood first, 0.5 in the mean if the judge prefers no place."""
        observed, self._observed = self._observed, defaultdict(list)
        return dict(observed)

    def _compare(self, samples: Sequence[Sample]) -> torch.Tensor:
        def prompt_of(i: int) -> tuple[int, str]:
            return samples[i].group, samples[i].prompt

        groups = [list(group) for _, group in itertools.groupby(range(len(samples)), key=prompt_of)]
        alone = [group[0] for group in groups if len(group) == 1]
        require(not alone, f"judge: a pairwise one compares samples of a prompt; {len(alone)} prompts have one sample only (k = 1)")
        pairs = [pair for group in groups for pair in itertools.permutations(group, 2)]
        wins = self._ask([self._fill(samples[a], response_a=samples[a].response, response_b=samples[b].response) for a, b in pairs])
        self._observed["first_wins"] += [first for first in wins if first is not None]
        scores = torch.zeros(len(samples), dtype=torch.float64)
        for (a, b), first in zip(pairs, wins, strict=True):
            scores[a] += self.settings.floor if first is None else first
            scores[b] += self.settings.floor if first is None else 1 - first
        questions = torch.tensor([2.0 * (len(group) - 1) for group in groups for _ in group], dtype=torch.float64)
        return (scores / questions).float()

    def _fill(self, sample: Sample, **responses: str) -> str:
        """The question about a sample, or about two of one prompt."""
        own = {"prompt": sample.prompt, "reference": sample.reference, "answers": self.settings.answers}
        values = sample.columns | own | responses
        missing = sorted(name for name in self._fields if values.get(name) is None)
        require(
            not missing,
            f"judge: the template's field {', '.join(missing)} is missing or null in a row; its columns are {', '.join(sample.columns)}, "
            "and it has a reference where the data set has completions (completion_column, completion_template)",
        )
        return self._question.format_map(values)

    def _ask(self, questions: Sequence[str]) -> list[float | None]:
        """The value of each answer; None for one that cannot be read and is to count as the floor."""
        settings = self.settings
        system = [{"role": "system", "content": settings.system_prompt}] if settings.system_prompt else []
        shared = {"model": self.model, "temperature": settings.temperature, **settings.constraint}
        shared |= {"max_tokens": 1 if settings.read == "logprobs" else settings.max_tokens, **settings.request}
        shared = {name: value for name, value in shared.items() if value is not None}
        bodies = [{"messages": [*system, {"role": "user", "content": question}], **shared} for question in questions]
        bad = []

        def read(answer: Any, i: int) -> float | None:
            try:
                return self._read(answer)
            except Unreadable as error:
                if settings.floor is None:
                    raise Unreadable(f"{error}, the answer to question {i}; on_unparsed can count it as a number") from error
                bad.append(str(error))
                return None

        values = self.servers.post("/chat/completions", bodies, read)
        if bad:
            message = "judge %s: %d of %d answers could not be read and count as %s; the first: %s"
            logger.warning(message, ", ".join(self.servers.urls), len(bad), len(values), settings.on_unparsed, bad[0])
        self._observed["unparsed"] += [float(value is None) for value in values]
        return values

    def _read(self, answer: Any) -> float:
        try:
            choice = answer["choices"][0]
            said = choice["message"]["content"] or ""
            tokens = choice["logprobs"]["content"] if self.settings.read == "logprobs" else []
        except (KeyError, IndexError, TypeError) as error:
            wanted = "chat completion with logprobs" if self.settings.read == "logprobs" else "chat completion"
            raise ValueError(f"the answer is no {wanted}: {str(answer)[:SHOWN]}") from error
        if self.settings.read == "logprobs":
            return expected_value(tokens[0].get("top_logprobs", []) if tokens else [], self.settings.choices, self.settings.min_probability)
        return chosen_value(said, self.settings)

    def _only_model(self) -> str:
        names = []
        for url, answer in zip(self.servers.urls, self.servers.get("/models"), strict=True):
            try:
                here = [model["id"] for model in answer["data"]]
            except (KeyError, TypeError) as error:
                raise UserError(f"judge {url}: /models is no list of models: {str(answer)[:SHOWN]}; set model") from error
            require(len(here) == 1, f"judge {url}: {len(here)} models there ({', '.join(here)[:SHOWN]}): set model")
            names += here
        where = ", ".join(self.servers.urls)
        require(len(set(names)) == 1, f"judge {where}: different models there ({', '.join(names)}): set model")
        return names[0]


def chosen_value(said: str, settings: JudgeSettings) -> float:
    """The value of an answer that is read as text.

    Raises:
        Unreadable: it is none of the possible ones.
    """
    answer: Any = said.strip()
    if settings.read == "json_schema":
        try:
            answer = json.loads(said)["answer"]
        except (ValueError, KeyError, TypeError) as error:
            raise Unreadable(f'{said[:SHOWN]!r} is not JSON such as {{"answer": …}}') from error
        if settings.mode == "score":
            low, high = settings.scale
            if isinstance(answer, int | float) and not isinstance(answer, bool) and low <= answer <= high:
                return float(answer)
            raise Unreadable(f"{said[:SHOWN]!r} is no number from {low:g} to {high:g}")
    if not isinstance(answer, str) or answer not in settings.choices:
        raise Unreadable(f"{said[:SHOWN]!r} is none of {', '.join(settings.choices)}")
    return settings.choices[answer]


def expected_value(top: Iterable[dict], choices: dict[str, float], min_probability: float) -> float:
    """Σ p · value / Σ p over the choices (Liu et al. 2023, arXiv 2303.16634). p sums the probabilities of the tokens that begin a choice
    and no other, white space around them aside. `top` are the likeliest first tokens, each with `token` and `logprob`.

    Raises:
        Unreadable: Σ p is below `min_probability`.
    """
    total, weighted = 0.0, 0.0
    for entry in top:
        begun = [choice for choice in choices if entry["token"].strip() and choice.startswith(entry["token"].strip())]
        if len(begun) == 1:
            probability = math.exp(entry["logprob"])
            total, weighted = total + probability, weighted + probability * choices[begun[0]]
    if total < min_probability:
        likeliest = ", ".join(repr(entry["token"]) for entry in itertools.islice(top, 5))
        raise Unreadable(f"the first token is {', '.join(choices)} with a probability of {total:.2g} only; the likeliest are {likeliest}")
    return weighted / total
