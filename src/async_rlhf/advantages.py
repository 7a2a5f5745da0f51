"""From scores to advantages, as pure functions of tensors: baselines, per-token rewards, GAE, whitening, and the two small states
that a run carries from update to update (the KL coefficient, the running moments of the scores).

`mask [..., R]` is True at response tokens. Log-probabilities, KL estimates, rewards and values are a token, in nats or in units of
the score. Values outside the mask may be anything, NaN included; what comes back is 0 there. Nothing here has a gradient to lose:
pass detached tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

ScoreAt = Literal["last_token", "next_token"]


def leave_one_out(scores: torch.Tensor) -> torch.Tensor:
    """Each score minus the mean of the other k − 1 of its prompt: `[..., k] -> [..., k]` (Kool et al. 2019; Ahmadian et al. 2024).

    A group whose scores are all equal gives exactly 0. Raises ValueError for k = 1, where there is nothing to compare with.
    """
    k = scores.shape[-1]
    if k < 2:
        raise ValueError("leave_one_out needs at least 2 scores a prompt: one alone has no other to be compared with")
    # Against the group's first score, so that equal scores are exact zeros and not the rounding error of their mean.
    shifted = scores - scores[..., :1]
    return shifted - (shifted.sum(-1, keepdim=True) - shifted) / (k - 1)


def _response_end(mask: torch.Tensor) -> torch.Tensor:
    """Index after the last True, `[..., R] -> [..., 1]`; 0 for an empty response."""
    return (mask * torch.arange(1, mask.shape[-1] + 1, device=mask.device)).amax(-1, keepdim=True)


def step_mask(mask: torch.Tensor, score_at: ScoreAt = "last_token") -> torch.Tensor:
    """The steps that have a reward and a value. "last_token": the response tokens, `[..., R]`. "next_token": one step more, the state
    after the last token, `[..., R + 1]`, so that a response as long as R has room for it too."""
    if score_at == "last_token":
        return mask
    longer = torch.nn.functional.pad(mask, (0, 1))
    return longer.scatter(-1, _response_end(mask), True)


def token_rewards(
    scores: torch.Tensor, kl: torch.Tensor, mask: torch.Tensor, kl_coef: float, score_at: ScoreAt = "last_token"
) -> torch.Tensor:
    """PPO's rewards: −kl_coef · kl a token, and the response's score at its end (Ziegler et al. 2019, eq. 2).

    `scores [...]`, `kl [..., R]` (with log π − log π_ref the sum of rewards is the KL-regularised score). "last_token": the score comes
    with the last response token, `[..., R]`; an empty response has no token to give it to. "next_token": one step later, `[..., R + 1]`,
    in the state after the last token, as in TRL's and torchtune's PPO. Pair either with the mask of `step_mask`.
    """
    rewards = torch.where(mask, -kl_coef * kl, 0.0)
    end = _response_end(mask)
    if score_at == "last_token":
        return rewards.scatter_add(-1, (end - 1).clamp(min=0), torch.where(end > 0, scores[..., None], 0.0))
    return torch.nn.functional.pad(rewards, (0, 1)).scatter_add(-1, end, scores[..., None])


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float = 1.0, lam: float = 0.95
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantages and returns (Schulman et al. 2016, eq. 16), each `[..., T]` like `rewards`, `values` and `mask`.

    δ_t = r_t + γ·V_{t+1} − V_t, A_t = δ_t + γλ·A_{t+1}, return_t = A_t + V_t. The state after the last step bootstraps 0. A masked-out
    step does not exist: the steps on its two sides are neighbours, so no mask can part a token from the score at the end.
    For `score_at="next_token"` T is R + 1: keep `advantages[..., :R]` for the policy and all R + 1 values for the value loss.
    """
    rewards, values = torch.where(mask, rewards, 0.0), torch.where(mask, values, 0.0)
    advantages = torch.zeros_like(values)
    advantage = next_value = torch.zeros_like(values[..., 0])
    for t in reversed(range(values.shape[-1])):
        step = mask[..., t]
        delta = rewards[..., t] + gamma * next_value - values[..., t]
        advantage = torch.where(step, delta + gamma * lam * advantage, advantage)
        next_value = torch.where(step, values[..., t], next_value)
        advantages[..., t] = torch.where(step, advantage, 0.0)
    return advantages, advantages + values


def whiten(values: torch.Tensor, mask: torch.Tensor, all_sum: Callable[[float], float] = float, keep_mean: bool = False) -> torch.Tensor:
    """Values `[...]` at mean 0 and variance 1 over the mask; `keep_mean` only scales (for rewards, whose mean means something).

    `all_sum` adds a number over ranks (`distributed.all_sum`), so that N ranks whiten like one; it is called three times on each. The
    variance is the population's: one value alone, or equal ones, are centred to 0 (or left, with `keep_mean`), never blown up.
    """
    kept = torch.where(mask, values, 0.0).double()
    count = max(all_sum(mask.sum()), 1.0)
    mean = all_sum(kept.sum()) / count
    centred = torch.where(mask, kept - mean, 0.0)
    variance = all_sum(centred.square().sum()) / count
    whitened = centred * (variance + 1e-8) ** -0.5
    return torch.where(mask, whitened + mean, 0.0).to(values.dtype) if keep_mean else whitened.to(values.dtype)


@dataclass(frozen=True)
class AdaptiveKL:
    """A KL coefficient that follows a target (Ziegler et al. 2019, section 2.2). A value: `update` returns the next one.

    `target` in nats a response; `horizon` in episodes: the time constant, so that the coefficient does not depend on the batch size.
    """

    coef: float
    target: float
    horizon: float = 10_000.0

    def update(self, kl: float, episodes: int) -> "AdaptiveKL":
        """After a batch of `episodes` with mean `kl`: coef · (1 + e · episodes/horizon), e = kl/target − 1 clipped to ±0.2.

        A batch above the horizon counts as one horizon, or a large one could turn the coefficient's sign.
        """
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return AdaptiveKL(self.coef * (1 + error * min(episodes / self.horizon, 1.0)), self.target, self.horizon)


@dataclass(frozen=True)
class RunningMoments:
    """Mean and deviation of all values seen, mergeable over batches and ranks (Chan et al. 1979). A value, like `AdaptiveKL`.

    `squares` is the sum of squared deviations from the mean.
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: torch.Tensor) -> "RunningMoments":
        if not values.numel():
            return cls()
        values = values.detach().double()
        mean = values.mean()
        return cls(float(values.numel()), float(mean), float((values - mean).square().sum()))

    def merge(self, other: "RunningMoments") -> "RunningMoments":
        count = self.count + other.count
        if not count:
            return self
        apart = other.mean - self.mean
        squares = self.squares + other.squares + apart**2 * self.count * other.count / count
        return RunningMoments(count, self.mean + apart * other.count / count, squares)

    @property
    def std(self) -> float:
        """Population deviation; 0 before anything was seen."""
        return (self.squares / self.count) ** 0.5 if self.count else 0.0

    def normalize(self, values: torch.Tensor) -> torch.Tensor:
        """(values − mean) / std; only centred while nothing has varied."""
        return (values - self.mean) / (self.std or 1.0)
