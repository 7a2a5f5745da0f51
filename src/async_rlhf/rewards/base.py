"""The reward interface: samples in, one score a sample out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from datasets import Dataset

from async_rlhf.data import Encoder
from async_rlhf.rollout import Rollout


@dataclass(frozen=True)
class Sample:
    """One completion to score, as text and as the policy's token ids, with every column of its data-set row.

    `response` is the text without the token that ended it; `finished` says whether one did.
    """

    prompt: str
    response: str
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    finished: bool = True
    columns: dict[str, Any] = field(default_factory=dict)


class Reward(Protocol):
    """Called on every rank with that rank's samples. Returns float scores, `[len(samples)]`."""

    def __call__(self, samples: Sequence[Sample]) -> torch.Tensor: ...


def rollout_samples(rollouts: Sequence[Rollout], rows: Dataset, encoder: Encoder) -> list[Sample]:
    """The samples to score: `rows[rollout.row]` is the data-set row of each rollout."""
    samples = []
    for rollout in rollouts:
        finished, row = rollout.finish_reason == "stop", rows[rollout.row]
        said = rollout.response_ids[:-1] if finished else rollout.response_ids
        text = encoder.tokenizer.decode(said, skip_special_tokens=True)
        samples.append(Sample(encoder.prompt_text(row), text, rollout.prompt_ids, rollout.response_ids, finished, row))
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
