"""RLOO and its relatives, synchronous or asynchronous: k samples a prompt, each judged by the mean score of the others.

    python rloo.py --config configs/rloo_tiny.yml                      # the paper's Proximal RLOO, one batch stale
    python rloo.py --config configs/rloo_tiny.yml --max_staleness 0    # the same, synchronous
    python rloo.py --config configs/bo2_tiny.yml                       # best of 2, supervised

The reward of a response is its score − kl_coef · Σ (log π − log π_ref); the advantage is the reward less the mean of the other k − 1
(Ahmadian et al. 2024). A unit of the loss is a sequence; with a ratio a token, its tokens are summed.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from async_rlhf.advantages import leave_one_out
from async_rlhf.algorithm import Algorithm, ScoredBatch, Tensors
from async_rlhf.config import RLConfig, require, run_script, setting
from async_rlhf.losses import copg_loss, kl_estimate, select_pairs, sequence_sum, supervised_loss
from async_rlhf.metrics import Metrics, policy_metrics
from async_rlhf.models import TOKEN_FIELDS, Policy, length_mask
from async_rlhf.off_policy import OffPolicyConfig, corrected_loss, ratio_tensors
from async_rlhf.trainer import run_algorithm

SURROGATES = {"proximal": "clip"}  # what losses.policy_loss calls it


@dataclass
class RLOOConfig(OffPolicyConfig, RLConfig):
    """The loop's settings, the ratio's, and RLOO's own."""

    loss_type: Literal["proximal", "reinforce", "cispo", "copg", "best_of_n"] = setting(
        "proximal",
        "proximal: clipped ratio to the sampling policy (the paper's Proximal RLOO); reinforce: no ratio; cispo: clipped ratio as a "
        "weight; copg: contrastive policy gradient, off-policy by construction; best_of_n: supervised loss on the best sample.",
    )
    ratio_level: Literal["sequence", "token"] = setting("sequence", "What a ratio and its clipping belong to.")
    kl_coef: float = setting(0.05, "Weight of the KL to the reference.")
    kl_in: Literal["reward", "sampled_reward", "loss"] = setting(
        "reward",
        "Where the KL is. reward: taken off the score, with the policy as it trains; sampled_reward: with the one that sampled, as in the "
        "paper's code (the same on-policy; stale, it is the other policy's KL); loss: a term of the loss.",
    )
    kl_estimator: Literal["k1", "k2", "k3"] = setting(
        "k2", "Estimate of the KL as a loss term. k1's gradient is 0 on average, k2's is the KL's, k3's (GRPO's) the reverse KL's."
    )

    def __post_init__(self):
        super().__post_init__()
        k = self.num_generations
        require(k >= 2, f"num_generations {k}: a response is compared with the others of its prompt, so at least 2")
        require(self.kl_coef >= 0, f"kl_coef {self.kl_coef}: 0 or more")
        require(
            self.loss_type != "copg" or (self.kl_coef > 0 and self.kl_in == "reward"),
            "loss_type copg holds the KL itself: it needs kl_coef above 0, and kl_in: reward",
        )
        if self.loss_type in ("copg", "best_of_n"):
            idle = "old_logprobs" if self.old_logprobs != "engine" else "correction" if self.correction != "none" else None
            require(not idle, f"{idle} {idle and getattr(self, idle)}: loss_type {self.loss_type} has no ratio; leave it out")
        else:
            self.check_correction(SURROGATES.get(self.loss_type, self.loss_type), self.ratio_level)


class RLOO(Algorithm):
    name = "rloo"

    def __init__(self, config: RLOOConfig):
        super().__init__(config)
        self.kl_coef = config.kl_coef
        self.surrogate = SURROGATES.get(config.loss_type, config.loss_type)

    def make_batch(self, scored: ScoredBatch, metrics: Metrics) -> Tensors:
        """A row a prompt with its k responses, or with the best one for best-of-n."""
        best, _, tied = select_pairs(scored.scores)
        metrics.observe("rloo/tied_frac", tied.float().cpu())
        batch = scored.tokens | {"behaviour_logprobs": scored.behaviour_logprobs, "ref_logprobs": scored.ref_logprobs}
        if self.config.loss_type == "best_of_n":
            rows = torch.arange(len(best), device=best.device)[:, None]
            responses = ("response_ids", "response_length", "behaviour_logprobs", "ref_logprobs")
            return batch | {name: batch[name][rows, best[:, None]] for name in responses} | {"weight": (~tied).float()}
        weight = torch.full_like(scored.scores[:, 0], self.config.num_generations)
        return batch | {"scores": scored.scores, "weight": weight} | ratio_tensors(self.config, scored)

    def loss(self, module: Policy, rows: Tensors, metrics: Metrics) -> torch.Tensor:
        config = self.config
        logprobs = module(**{name: rows[name] for name in TOKEN_FIELDS}, temperature=config.temperature)
        mask = length_mask(rows["response_length"], logprobs.shape[-1])
        weight = rows["weight"].sum()
        if config.loss_type == "best_of_n":
            losses = supervised_loss(logprobs, mask) * rows["weight"][:, None]
        elif config.loss_type == "copg":
            losses = copg_loss(rows["scores"], sequence_sum(logprobs - rows["ref_logprobs"], mask), config.kl_coef)
        else:
            advantages = leave_one_out(self._rewards(logprobs.detach(), rows, mask))
            metrics.mean("rloo/advantage_abs", advantages.abs().sum(), weight)
            losses = corrected_loss(config, self.surrogate, config.ratio_level, logprobs, rows | {"advantages": advantages}, mask, metrics)
        metrics.mean("loss/policy", losses.detach().sum(), weight)
        loss = losses.sum()
        if config.kl_in == "loss" and config.kl_coef:
            kl = sequence_sum(kl_estimate(logprobs, rows["ref_logprobs"], mask, config.kl_estimator), mask)
            if config.loss_type == "best_of_n":
                kl = kl * rows["weight"][:, None]  # a tied prompt is no unit
            metrics.mean("loss/kl", kl.detach().sum(), weight)
            loss = loss + config.kl_coef * kl.sum()
        policy_metrics(metrics, logprobs, rows["behaviour_logprobs"], mask)
        return loss

    def _rewards(self, logprobs: torch.Tensor, rows: Tensors, mask: torch.Tensor) -> torch.Tensor:
        """`[p, k]`: scores, less the KL where it belongs to the reward."""
        policy = {"reward": logprobs, "sampled_reward": rows["behaviour_logprobs"]}.get(self.config.kl_in)
        if policy is None:
            return rows["scores"]
        return rows["scores"] - self.config.kl_coef * sequence_sum(policy - rows["ref_logprobs"], mask)


def main() -> None:
    run_algorithm(RLOOConfig, RLOO)


if __name__ == "__main__":
    run_script(main)
