"""The contract of an algorithm: scored rollouts in, a training batch out, and a loss over its rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from async_rlhf.config import RLConfig
from async_rlhf.metrics import Metrics
from async_rlhf.models import Policy
from async_rlhf.rewards import RewardSet
from async_rlhf.rollout import Rollout

Tensors = dict[str, torch.Tensor]


@dataclass
class ScoredBatch:
    """One rank's share of a batch, in training order: p prompts, k completions each, R the longest response.

    `tokens` are those of `pad_tokens`; `mask [p, k, R]`; `scores [p, k]` with the missing-eos penalty applied; and
    `behaviour_logprobs`, the generator's own, and `ref_logprobs`, the reference's, `[p, k, R]`, at the sampling temperature.
    `steps_behind [p]` counts the optimizer steps that the sampling snapshot lacks before the update.
    `evaluate()` gives what the trained module says of all rows now, before the update, without gradients.
    """

    update: int
    rollouts: list[list[Rollout]]
    tokens: Tensors
    mask: torch.Tensor
    scores: torch.Tensor
    behaviour_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor
    steps_behind: torch.Tensor
    evaluate: Callable[..., Any]


class Algorithm:
    """What differs between algorithms: how scored rollouts become a training batch, and the loss over it.

    `name` prefixes the algorithm's own metrics; `kl_coef` weighs the KL in `objective/rlhf_reward`; `held` names the parts of the module
    (`ModuleOptimizer`) that do not train yet in this update.
    """

    name: str
    kl_coef: float
    held: tuple[str, ...] = ()

    def __init__(self, config: RLConfig):
        self.config = config

    def module(self, policy: Policy, rewards: RewardSet, mixed_precision: bool) -> nn.Module:
        """What is trained: the policy, or a module whose `policy` it is."""
        return policy

    def make_batch(self, scored: ScoredBatch, metrics: Metrics) -> Tensors:
        """Tensors with a row a prompt, those of `pad_tokens` among them; `weight [p]` is how many units of the loss (pairs, sequences,
        tokens) a row holds."""
        raise NotImplementedError

    def loss(self, module: nn.Module, rows: Tensors, metrics: Metrics) -> torch.Tensor:
        """The loss summed over the rows' units, a scalar. The trainer divides by the mini-batch's units over all ranks. `rows` also
        holds `steps_in_update [p]`, the optimizer steps taken in this update."""
        raise NotImplementedError

    def models(self, module: nn.Module) -> dict[str, nn.Module]:
        """Models that a checkpoint keeps beside the policy, by the name of their folder in it."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What the algorithm carries from update to update, as tensors, numbers, strings, and lists and dicts of them."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave."""

    def stops(self) -> bool:
        """Asked on every rank after each epoch: whether the update's other epochs are left out."""
        return False
