"""Online DPO, synchronous or asynchronous: k samples a prompt, the best against the worst by the reward, a preference loss.

    python online_dpo.py --config configs/onlinedpo_tiny.yml                      # 2 CPU cores, one of them vLLM's
    python online_dpo.py --config configs/onlinedpo_tiny.yml --max_staleness 0    # the same, synchronous
    accelerate launch --multi_gpu --num_processes 3 online_dpo.py --config configs/onlinedpo_pythia410m_tldr_vllm_bf16_4gpu.yml

The loss is off-policy as soon as `max_staleness`, `num_mini_batches` or `num_ppo_epochs` lets the policy move on from the
one that sampled. DPO's needs no importance ratio (Noukhovitch et al. 2024, section 3); `off_policy_correction` weights the
pairs by one nevertheless, towards those that the policy would sample now (docs/off_policy.md).
"""

from dataclasses import dataclass
from typing import Literal

import torch

from async_rlhf.algorithm import Algorithm, ScoredBatch, Tensors
from async_rlhf.config import RLConfig, require, run_script, setting
from async_rlhf.losses import pair_log_weights, pair_weights, preference_loss, select_pairs, sequence_sum
from async_rlhf.metrics import Metrics, policy_metrics
from async_rlhf.models import Policy, length_mask
from async_rlhf.trainer import run_algorithm


@dataclass
class OnlineDPOConfig(RLConfig):
    """The loop's settings, and the preference loss."""

    beta: float = setting(0.1, "Strength of the pull to the reference policy.")
    loss_type: Literal["sigmoid", "ipo", "hinge", "robust"] = setting(
        "sigmoid",
        "sigmoid: DPO's logistic loss; ipo: IPO's squared one; hinge: SLiC's; robust: the logistic one, unbiased where "
        "`label_smoothing` of the preferences are wrong.",
    )
    label_smoothing: float = setting(
        0.0, "Share of preferences taken to be wrong, below 0.5, for loss_type robust, or sigmoid (which is then conservative DPO)."
    )
    off_policy_correction: Literal["none", "sequence", "group", "token_mean", "mask"] = setting(
        "none",
        "Weight of a pair that an older policy sampled. sequence: π/μ of both responses, truncated; group: of all k samples, exact "
        "for k above 2 too, at k - 2 more forwards without gradient; token_mean: the two responses' mean token ratios, for long ones; "
        "mask: pairs outside a band of π/μ are dropped. See docs/off_policy.md.",
    )
    pair_weight_cap: float | None = setting(
        2.0, "Largest weight of a pair, 1 or more; null truncates nothing. mask keeps the pairs within 1/cap and cap."
    )

    def __post_init__(self):
        super().__post_init__()
        require(self.num_generations >= 2, f"num_generations {self.num_generations}: a pair needs at least 2 completions a prompt")
        require(self.beta > 0, f"beta {self.beta}: above 0")
        self._check_loss()
        self._check_correction()

    def _check_loss(self) -> None:
        smoothing, loss = self.label_smoothing, self.loss_type
        require(0 <= smoothing < 0.5, f"label_smoothing {smoothing}: 0 or more, below 0.5, where preferences would say nothing")
        require(
            not smoothing or loss in ("sigmoid", "robust"),
            f"label_smoothing {smoothing} has no meaning for loss_type {loss}: take loss_type robust or sigmoid, or leave it at 0",
        )
        require(smoothing or loss != "robust", "loss_type robust with label_smoothing 0 is sigmoid: set the share of wrong preferences")

    def _check_correction(self) -> None:
        correction, cap = self.off_policy_correction, self.pair_weight_cap
        require(cap is None or cap >= 1, f"pair_weight_cap {cap}: 1 or more, or null")
        require(
            correction != "mask" or (cap and cap > 1),
            f"off_policy_correction mask with pair_weight_cap {cap}: the band from 1/cap to cap needs a cap above 1",
        )
        require(
            correction == "none" or (self.top_p == 1 and self.top_k == 0),
            f"off_policy_correction {correction} with top_p or top_k: π/μ is no ratio of what was sampled then; leave them at 1 and 0",
        )


class OnlineDPO(Algorithm):
    name = "dpo"

    def __init__(self, config: OnlineDPOConfig):
        super().__init__(config)
        self.kl_coef = config.beta

    def make_batch(self, scored: ScoredBatch, metrics: Metrics) -> Tensors:
        """A row a prompt. Its second dimension is the pair (chosen, rejected); under `group` the other k - 2 samples follow, without
        a reference. A tied pair weighs nothing."""
        best, worst, tied = select_pairs(scored.scores)
        pair = torch.stack([best, worst], 1)
        rows = torch.arange(len(pair), device=pair.device)[:, None]
        samples = pair
        if self.config.off_policy_correction == "group":
            others = torch.zeros_like(scored.scores).scatter(1, pair, 1.0).argsort(dim=1, stable=True)  # unselected ones first
            samples = torch.cat([pair, others[:, : scored.scores.shape[1] - 2]], 1)
        metrics.observe("dpo/tied_frac", tied.float().cpu())
        return {
            "prompt_ids": scored.tokens["prompt_ids"],
            "prompt_length": scored.tokens["prompt_length"],
            "response_ids": scored.tokens["response_ids"][rows, samples],
            "response_length": scored.tokens["response_length"][rows, samples],
            "behaviour_logprobs": scored.behaviour_logprobs[rows, samples],
            "ref_logprobs": scored.ref_logprobs[rows, pair],
            "weight": (~tied).float(),
        }

    def loss(self, policy: Policy, rows: Tensors, metrics: Metrics) -> torch.Tensor:
        logprobs = self._logprobs(policy, rows, slice(0, 2))
        mask = length_mask(rows["response_length"][:, :2], logprobs.shape[-1])
        logratio = sequence_sum(logprobs - rows["ref_logprobs"], mask)
        config = self.config
        losses = preference_loss(logratio[:, 0], logratio[:, 1], config.beta, config.loss_type, config.label_smoothing)
        if config.off_policy_correction != "none":
            losses = losses * self._pair_weights(policy, rows, logprobs.detach(), metrics)
        weight = rows["weight"]
        loss = (losses * weight).sum()

        margin = config.beta * (logratio[:, 0] - logratio[:, 1]).detach()
        metrics.mean("loss/policy", loss.detach(), weight.sum())
        metrics.mean("dpo/margin", (margin * weight).sum(), weight.sum())
        metrics.mean("dpo/accuracy", ((margin > 0) * weight).sum(), weight.sum())
        policy_metrics(metrics, logprobs, rows["behaviour_logprobs"][:, :2], mask)
        return loss

    def _logprobs(self, policy: Policy, rows: Tensors, samples: slice) -> torch.Tensor:
        responses = {name: rows[name][:, samples] for name in ("response_ids", "response_length")}
        prompts = {name: rows[name] for name in ("prompt_ids", "prompt_length")}
        return policy(**prompts, **responses, temperature=self.config.temperature)

    def _pair_weights(self, policy: Policy, rows: Tensors, pair_logprobs: torch.Tensor, metrics: Metrics) -> torch.Tensor:
        """`[pairs]`, from the pair's log-probabilities under the policy as it is now; the other samples' are computed here."""
        correction, current = self.config.off_policy_correction, pair_logprobs
        if rows["response_ids"].shape[1] > 2:
            with torch.no_grad():
                current = torch.cat([current, self._logprobs(policy, rows, slice(2, None))], 1)
        mask = length_mask(rows["response_length"], current.shape[-1])
        log_weights = pair_log_weights(current, rows["behaviour_logprobs"], mask, per_token=correction == "token_mean")
        weights = pair_weights(log_weights, self.config.pair_weight_cap, drop=correction == "mask")

        untied = rows["weight"] > 0
        raw, used = log_weights[untied].exp(), weights[untied]
        metrics.mean("dpo/weight_mean", raw.sum(), len(raw))
        metrics.mean("dpo/weight_used", used.sum(), len(raw))
        metrics.mean("dpo/weight_cut_frac", (used == 0 if correction == "mask" else used < raw).sum(), len(raw))
        if len(raw):
            metrics.maximum("dpo/weight_max", raw.max())
            metrics.effective_samples("dpo/weight_ess", log_weights[untied])
        return weights


def main() -> None:
    run_algorithm(OnlineDPOConfig, OnlineDPO)


if __name__ == "__main__":
    run_script(main)
