"""Settings of the ratio that PPO and RLOO train with, and the policy loss under them (docs/off_policy.md says what each estimates)."""

from dataclasses import dataclass
from typing import Literal

import torch

from async_rlhf.algorithm import ScoredBatch, Tensors
from async_rlhf.config import require, setting
from async_rlhf.losses import interpolate_proximal, policy_loss
from async_rlhf.metrics import Metrics


@dataclass
class OffPolicyConfig:
    """What a ratio divides by, how it is clipped, and what corrects for the policy that sampled."""

    old_logprobs: Literal["engine", "recompute", "interpolate"] = setting(
        "engine",
        "What a ratio divides by. engine: the log-probabilities that the generator recorded; recompute: the trainer's own at the start "
        "of the update; interpolate: those, estimated between engine and current policy without a forward (A-3PO).",
    )
    clip_range: float = setting(0.2, "A ratio counts between 1 − clip_range and 1 + clip_range. With cispo only from above.")
    clip_range_high: float | None = setting(None, "Upper clip range. Default: `clip_range`.")
    correction: Literal["none", "truncate_token", "truncate_sequence", "mask_token", "mask_sequence"] = setting(
        "none",
        "Weight for what the ratio leaves out, old policy over sampling policy. truncate: clamped into the range below (with old_logprobs: "
        "recompute that is decoupled PPO); mask: dropped outside the range. By token or by whole response.",
    )
    correction_low: float = setting(0.0, "Lower end of the correction's range.")
    correction_high: float = setting(2.0, "Upper end of the correction's range.")

    def __post_init__(self):
        super().__post_init__()
        for name in ("clip_range", "clip_range_high"):
            value = getattr(self, name)
            require(value is None or value > 0, f"{name} {value}: above 0")
        band = f"correction_low {self.correction_low}, correction_high {self.correction_high}"
        require(0 <= self.correction_low < self.correction_high, f"{band}: 0 or more, and in order")
        require(self.correction_low <= 1 <= self.correction_high, f"{band}: 1, on-policy, must be inside")

    def check_correction(self, surrogate: str, ratio_level: str) -> None:
        """Raise `UserError` for a correction that has no meaning with this surrogate, and for ratios of what was not sampled from μ."""
        whole = self.top_p == 1 and self.top_k == 0
        plain = surrogate == "reinforce" and self.correction == "none"
        require(
            not (plain and self.old_logprobs != "engine"), f"old_logprobs {self.old_logprobs}: reinforce without a correction has no ratio"
        )
        require(whole or plain, "top_p or top_k: a ratio π/μ does not describe what was sampled then; leave them at 1 and 0")
        by_token = ratio_level == "sequence" and self.correction.endswith("_token")
        require(not by_token, f"correction {self.correction}: weighs tokens, and with ratio_level sequence a loss is of a whole response")
        idle = self.correction.startswith("truncate") and surrogate != "reinforce" and self.old_logprobs == "engine"
        require(not idle, f"correction {self.correction}: with old_logprobs engine the ratio is complete; set old_logprobs: recompute")


def ratio_tensors(config: OffPolicyConfig, scored: ScoredBatch) -> Tensors:
    """What the batch carries for the ratio: the trainer's log-probabilities before the update, or how stale each row is then."""
    if config.old_logprobs == "recompute":
        return {"old_logprobs": scored.evaluate()}
    return {"steps_behind": scored.steps_behind} if config.old_logprobs == "interpolate" else {}


def corrected_loss(
    config: OffPolicyConfig, surrogate: str, ratio_level: str, logprobs: torch.Tensor, rows: Tensors, mask: torch.Tensor, metrics: Metrics
) -> torch.Tensor:
    """`losses.policy_loss` of the rows by the settings: `[p, k, R]` or `[p, k]`. Logs the shares that were clipped and corrected."""
    proximal = rows.get("old_logprobs")
    if config.old_logprobs == "interpolate":
        behind = rows["steps_behind"]
        share = torch.where(behind > 0, behind / (behind + rows["steps_in_update"]).clamp(min=1), 0.0)
        proximal = interpolate_proximal(logprobs, rows["behaviour_logprobs"], share[:, None, None])
    loss, clipped, corrected = policy_loss(
        logprobs,
        rows["behaviour_logprobs"],
        rows["advantages"],
        mask,
        proximal=proximal,
        surrogate=surrogate,
        ratio_level=ratio_level,
        clip_range=(
            1.0 if surrogate == "cispo" else config.clip_range,
            config.clip_range if config.clip_range_high is None else config.clip_range_high,
        ),
        correction=config.correction,
        correction_range=(config.correction_low, config.correction_high),
    )
    units = mask.sum() if clipped.dim() == mask.dim() else clipped.numel()
    metrics.mean("policy/clip_frac", (clipped & mask if clipped.dim() == mask.dim() else clipped).sum(), units)
    if config.correction != "none":
        metrics.mean("policy/corrected_frac", corrected.sum(), mask.sum() if corrected.dim() == mask.dim() else corrected.numel())
    return loss
