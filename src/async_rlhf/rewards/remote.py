"""A reward behind HTTP, in the form that OpenRLHF's `--remote_rm_url` servers and `serve_reward_model.py` speak.

    POST {"query": [prompt + response, …], "prompts": [prompt, …], "labels": [label, …]}  ->  {"rewards": [score, …]}

Beside these: `responses`, `finished` and `groups`, and where they are asked for `columns`, `prompt_ids`, `response_ids` and `vocabulary`.
What else the answer holds (OpenRLHF's `scores`, `extra_logs`) is left out.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin

import httpx
import torch
from transformers import PreTrainedTokenizerBase

from async_rlhf.config import UserError, require, setting
from async_rlhf.rewards.base import RewardContext, Sample
from async_rlhf.rewards.servers import SHOWN, Servers, ServerSettings
from async_rlhf.vocabulary import describe_vocabulary, vocabulary_difference

LARGEST = torch.finfo(torch.float32).max


@dataclass
class RemoteSettings(ServerSettings):
    """A reward behind HTTP."""

    remote: list[str] = setting([], "URL that takes the samples; several share them.")
    batch_size: int = setting(64, "Samples a request. Those of one prompt stay together, even if they are more.")
    label_column: str | None = setting(
        None, "Column sent as `labels`. Default: the data set's own completion, where it has one, else empty."
    )
    eos_in_query: bool = setting(
        True, "End `query` with the text of the policy's end of sequence where the response ended, as OpenRLHF does."
    )
    send_columns: list[str] = setting([], "Columns of the data set to send along; `*` is all of them.")
    send_ids: bool = setting(
        False, "Send the policy's token ids along, for a reward of the same vocabulary; only to `serve_reward_model.py`, which checks that."
    )

    def __post_init__(self):
        super().__post_init__()
        self.remote = [self.remote] if isinstance(self.remote, str) else self.remote
        require(self.batch_size >= 1, f"batch_size {self.batch_size}: at least 1")

    @property
    def columns(self) -> set[str]:
        return {name for name in [*self.send_columns, self.label_column] if name not in (None, "*")}

    def default_name(self) -> str:
        return httpx.URL(self.remote[0]).netloc.decode()

    def check(self) -> None:
        self.check_servers(self.remote)

    def open(self, context: RewardContext) -> "RemoteReward":
        return RemoteReward(self, context.policy_tokenizer)


class RemoteReward:
    """Asks the servers. `tokenizer` is the policy's.

    Raises:
        UserError: with `send_ids`, a server of another vocabulary, or none of ours.
    """

    collective = False

    def __init__(self, settings: RemoteSettings, tokenizer: PreTrainedTokenizerBase | None = None):
        self.settings, self.servers = settings, Servers(settings.remote, settings)
        self.eos = tokenizer.eos_token if tokenizer is not None and settings.eos_in_query else ""
        self.vocabulary = self._check_vocabulary(tokenizer) if settings.send_ids else None

    def __call__(self, samples: Sequence[Sample]) -> torch.Tensor:
        """
        Raises:
            UserError: no server answers, or one does wrongly; it names the URL. Or a column that JSON cannot hold.
        """
        chunks = list(in_requests(samples, self.settings.batch_size))
        answers = self.servers.post("", [self.body(chunk) for chunk in chunks], lambda answer, i: read_scores(answer, chunks[i]))
        return torch.tensor([score for scores in answers for score in scores])

    def close(self) -> None:
        pass

    def body(self, samples: Sequence[Sample]) -> dict[str, list]:
        """What is sent of some samples."""
        body = {
            "query": [sample.prompt + sample.response + (self.eos if sample.finished else "") for sample in samples],
            "prompts": [sample.prompt for sample in samples],
            "labels": [self._label(sample) for sample in samples],
            "responses": [sample.response for sample in samples],
            "finished": [sample.finished for sample in samples],
            "groups": [sample.group for sample in samples],
        }
        if self.settings.send_columns:
            body["columns"] = [self._columns(sample) for sample in samples]
        if self.vocabulary:
            body["prompt_ids"] = [sample.prompt_ids for sample in samples]
            body["response_ids"] = [sample.response_ids for sample in samples]
            body["vocabulary"] = self.vocabulary
        return body

    def _label(self, sample: Sample) -> Any:
        if self.settings.label_column:
            return self._columns(sample, [self.settings.label_column])[self.settings.label_column]
        return sample.reference or ""

    def _columns(self, sample: Sample, names: Sequence[str] | None = None) -> dict[str, Any]:
        names = self.settings.send_columns if names is None else names
        columns = {}
        for name in sample.columns if "*" in names else names:
            require(name in sample.columns, f"remote: no column {name}; the row has {', '.join(sample.columns)}")
            columns[name] = sample.columns[name]
            try:
                json.dumps(columns[name], allow_nan=False)
            except (TypeError, ValueError) as error:
                said = f"{columns[name]!r:.{SHOWN}}"
                raise UserError(f"remote: JSON cannot hold column {name}, {said}: name the others in send_columns") from error
        return columns

    def _check_vocabulary(self, tokenizer: PreTrainedTokenizerBase | None) -> str:
        """The hash of the vocabulary, the policy's and every server's."""
        require(tokenizer is not None, "send_ids: there is no policy here whose token ids could be sent")
        own = describe_vocabulary(tokenizer)
        for url in self.settings.remote:
            health = urljoin(url, "health")
            (answer,) = Servers([health], self.settings).get("")
            refuse_other_vocabulary("send_ids", health, answer, own, tokenizer.name_or_path)
        return own["hash"]


def in_requests(samples: Sequence[Sample], size: int) -> Iterator[list[Sample]]:
    """Samples in their order, `size` at a time or fewer; those of one prompt that stand in a row stay together, whatever their number."""
    chunk: list[Sample] = []
    for _, group in itertools.groupby(samples, key=lambda sample: (sample.group, sample.prompt)):
        together = list(group)
        if chunk and len(chunk) + len(together) > size:
            yield chunk
            chunk = []
        chunk = chunk + together
    if chunk:
        yield chunk


def read_scores(answer: Any, samples: Sequence[Sample]) -> list[float]:
    """The scores in a server's answer, one a sample.

    Raises:
        ValueError: no list `rewards`, a wrong number of them, or one that is no finite number; it names the sample.
    """
    rewards = answer.get("rewards") if isinstance(answer, dict) else None
    if not isinstance(rewards, list):
        raise ValueError(f'no list "rewards" in the answer: {answer!r:.{SHOWN}}')
    if len(rewards) != len(samples):
        raise ValueError(f"{len(rewards)} rewards for {len(samples)} samples; one a sample is needed")
    for reward, sample in zip(rewards, samples, strict=True):
        if not is_finite_number(reward):
            raise ValueError(f"reward {reward!r:.{SHOWN}} for the response {sample.response[:SHOWN]!r}; a finite number is needed")
    return rewards


def is_finite_number(value: Any) -> bool:
    """Whether it is a number that float32 can hold; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def refuse_other_vocabulary(field: str, url: str, health: Any, own: dict | None, name: str) -> None:
    """Compare the vocabulary that a server's `/health` describes with one's own, that of the tokenizer `name`.

    Raises:
        UserError: they differ, or the server describes none; it begins with `field` and names both.
    """
    theirs = health.get("vocabulary") if isinstance(health, dict) else None
    require(
        isinstance(theirs, dict) and {"hash", "added", "pad"} <= theirs.keys(),
        f"{field}: {url} describes no vocabulary: serve_reward_model.py does, once it has a tokenizer "
        "(model_name_or_path, tokenizer_name_or_path or reference_model_path)",
    )
    difference = vocabulary_difference(theirs, own)
    require(
        not difference,
        f"{field}: the vocabulary at {url} ({theirs.get('name')}, {theirs['hash']}) is not the policy's "
        f"({name}, {own and own['hash']}): {difference}",
    )
