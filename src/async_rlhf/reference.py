"""The reference policy behind one call, whether it is a model of its own here, the trained one without its adapter, or a server's."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from async_rlhf.algorithm import Tensors
from async_rlhf.batching import forward_rows
from async_rlhf.models import Policy


class Reference(Protocol):
    """`path` is what the reference is loaded from where it is, if it says."""

    path: str | None

    def __call__(self, tokens: Tensors, temperature: float) -> torch.Tensor:
        """Log-probabilities of the responses at `temperature`, `[p, k, R]`, on the device of `tokens`, which are those of `pad_tokens`.
        What stands after a response's end is meaningless."""


class LocalReference:
    """A policy in this process, `prompts_per_forward` prompts at a time; `without` is entered meanwhile, to switch an adapter off."""

    path = None

    def __init__(self, policy: Policy, prompts_per_forward: int, without: Callable[[], AbstractContextManager] = nullcontext):
        self.policy, self.prompts_per_forward, self.without = policy, prompts_per_forward, without

    @torch.no_grad()
    def __call__(self, tokens: Tensors, temperature: float) -> torch.Tensor:
        with self.without():
            return forward_rows(self.policy, tokens, self.prompts_per_forward, temperature=temperature)
