"""The contract of an algorithm: scored rollouts in, a training batch out, and a loss over its rows."""

from dataclasses import dataclass
from typing import Protocol

import torch

from async_rlhf.metrics import Metrics
from async_rlhf.models import Policy
from async_rlhf.rollout import Rollout

Tensors = dict[str, torch.Tensor]


@dataclass
class ScoredBatch:
    """One rank's share of a batch, in training order: p prompts, k completions each, R the longest response.

    `tokens` are those of `pad_tokens`; `mask [p, k, R]`; `scores [p, k]` with the missing-eos penalty applied; and
    `behaviour_logprobs`, the generator's own, and `ref_logprobs`, the reference's, `[p, k, R]`, at the sampling temperature.
    """

    rollouts: list[list[Rollout]]
    tokens: Tensors
    mask: torch.Tensor
    scores: torch.Tensor
    behaviour_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor


class Algorithm(Protocol):
    """What differs between algorithms: how scored rollouts become a training batch, and the loss over it."""

    kl_coef: float

    def make_batch(self, scored: ScoredBatch, metrics: Metrics) -> Tensors:
        """Tensors with a row a prompt; `weight [p]` is how many units of the loss (pairs, sequences, tokens) a row holds."""

    def loss(self, policy: Policy, rows: Tensors, metrics: Metrics) -> torch.Tensor:
        """The loss summed over the rows' units, a scalar. The trainer divides by the mini-batch's units over all ranks."""
