"""The reward interface: samples in, one score a sample out; and what the kinds of rewards share."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from async_rlhf.config import ModelConfig, setting
from async_rlhf.data import Encoder
from async_rlhf.rollout import Rollout


@dataclass(frozen=True)
class Sample:
    """One completion to score, as text and as the policy's token ids, with every column of its data-set row.

    `response` is the text without the token that ended it; `finished` says whether one did. Samples of one prompt stand in a row and
    share `group`. `reference` is the data set's own completion, where it has one.
    """

    prompt: str
    response: str
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    finished: bool = True
    columns: dict[str, Any] = field(default_factory=dict)
    group: int = 0
    reference: str | None = None


class Reward(Protocol):
    """Called on every rank with that rank's samples. Returns float scores, `[len(samples)]`.

    A `collective` one works only if all ranks enter it together, and is then called without samples too.
    """

    collective: bool = False

    def __call__(self, samples: Sequence[Sample]) -> torch.Tensor: ...

    def observed(self) -> dict[str, list[float]]:
        """What it noticed since this was last called, to be logged as means beside its score. May be left out."""
        return {}

    def close(self) -> None:
        """Give back what it holds. May be left out."""


@dataclass(frozen=True)
class RewardContext:
    """What a script knows that a reward may need: where to compute, the policy's tokenizer, and, where a reward that is a LoRA adapter may
    share it, the policy's model with its settings."""

    device: torch.device | str = "cpu"
    policy_tokenizer: PreTrainedTokenizerBase | None = None
    batch_size: int = 64
    dtype: torch.dtype = torch.float32
    trust_remote_code: bool = False
    trunk: PeftModel | None = None
    policy: ModelConfig | None = None


@dataclass
class RewardSettings:
    """Settings that every kind of reward has. A kind adds its own, one of them named like the kind: what the reward is."""

    name: str | None = setting(None, "Its name in the logs. Default: the last part of what it is.")
    weight: float = setting(1.0, "What its score counts for in the sum.")
    relative: bool = setting(False, "Subtract the score of the data set's own completion of the prompt, which is scored once.")

    @property
    def collective(self) -> bool:
        """Whether the reward works only if all ranks enter it together."""
        return False

    def adapts(self, policy: ModelConfig) -> bool:
        """Whether it is an adapter of the model that the policy starts from."""
        return False

    @property
    def compares(self) -> bool:
        """Whether it scores a sample against the others of its prompt, so that one alone has no score."""
        return False

    @property
    def reads_reference(self) -> bool:
        """Whether it reads the data set's own completion."""
        return self.relative

    @property
    def columns(self) -> set[str]:
        """Columns of the data set that it cannot do without, as far as its settings say."""
        return set()

    def default_name(self) -> str:
        raise NotImplementedError

    def check(self) -> None:
        """Raise `UserError` if the reward cannot be. Loads no model, asks no server."""

    def open(self, context: RewardContext) -> Reward:
        """The reward itself.

        Raises:
            UserError: nothing usable there.
        """
        raise NotImplementedError


def rollout_samples(rollouts: Sequence[Rollout], rows: Dataset, encoder: Encoder) -> list[Sample]:
    """The samples to score: `rows[rollout.row]` is the data-set row of each rollout."""
    has_reference = Encoder.completion_columns(encoder.config) <= set(rows.column_names)
    samples = []
    for rollout in rollouts:
        finished, row = rollout.finish_reason == "stop", rows[rollout.row]
        said = rollout.response_ids[:-1] if finished else rollout.response_ids
        samples.append(
            Sample(
                prompt=encoder.prompt_text(row),
                response=encoder.tokenizer.decode(said, skip_special_tokens=True),
                prompt_ids=rollout.prompt_ids,
                response_ids=rollout.response_ids,
                finished=finished,
                columns=row,
                group=rollout.position,
                reference=encoder.reference_text(row) if has_reference else None,
            )
        )
    return samples


def score_samples(reward: Reward, samples: Sequence[Sample], name: str) -> torch.Tensor:
    """The reward's scores, checked: float `[len(samples)]` on the CPU.

    Raises:
        ValueError: a wrong number of scores, or one that is not finite; it names the reward and the sample.
    """
    scores = torch.as_tensor(reward(samples), dtype=torch.float32).cpu()
    if scores.shape != (len(samples),):
        raise ValueError(f"reward {name}: {tuple(scores.shape)} scores for {len(samples)} samples; one a sample is needed")
    bad = (~scores.isfinite()).nonzero()
    if len(bad):
        sample = samples[int(bad[0])]
        raise ValueError(f"reward {name}: score {scores[bad[0]].item()} for sample {int(bad[0])}, response {sample.response[:200]!r}")
    return scores
