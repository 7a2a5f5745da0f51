"""Online DPO, synchronous or asynchronous: k samples a prompt, the best against the worst by the reward, a preference loss.

    python online_dpo.py --config configs/onlinedpo_tiny.yml                      # 2 CPU cores, one of them vLLM's
    python online_dpo.py --config configs/onlinedpo_tiny.yml --max_staleness 0    # the same, synchronous
    accelerate launch --multi_gpu --num_processes 3 online_dpo.py --config configs/onlinedpo_pythia410m_tldr_vllm_bf16_4gpu.yml

The loss is off-policy as soon as `max_staleness`, `num_mini_batches` or `num_ppo_epochs` lets the policy move on from the
one that sampled; DPO's needs no importance ratio (Noukhovitch et al. 2024, section 3).
"""

from dataclasses import dataclass
from typing import Literal

import torch

from async_rlhf.algorithm import Algorithm, ScoredBatch, Tensors
from async_rlhf.config import RLConfig, require, run_script, setting
from async_rlhf.losses import preference_loss, select_pairs, sequence_sum
from async_rlhf.metrics import Metrics, policy_metrics
from async_rlhf.models import TOKEN_FIELDS, Policy, length_mask
from async_rlhf.trainer import run_algorithm


@dataclass
class OnlineDPOConfig(RLConfig):
    """The loop's settings, and the preference loss."""

    beta: float = setting(0.1, "Strength of the pull to the reference policy.")
    loss_type: Literal["sigmoid", "ipo"] = setting("sigmoid", "sigmoid: DPO's logistic loss; ipo: IPO's squared one.")

    def __post_init__(self):
        super().__post_init__()
        require(self.num_generations >= 2, f"num_generations {self.num_generations}: a pair needs at least 2 completions a prompt")
        require(self.beta > 0, f"beta {self.beta}: above 0")


class OnlineDPO(Algorithm):
    name = "dpo"

    def __init__(self, config: OnlineDPOConfig):
        super().__init__(config)
        self.kl_coef = config.beta

    def make_batch(self, scored: ScoredBatch, metrics: Metrics) -> Tensors:
        """A row a prompt, the pair (chosen, rejected) in its second dimension. A tied pair weighs nothing."""
        best, worst, tied = select_pairs(scored.scores)
        pair = torch.stack([best, worst], 1)
        rows = torch.arange(len(pair), device=pair.device)[:, None]
        metrics.observe("dpo/tied_frac", tied.float().cpu())
        return {
            "prompt_ids": scored.tokens["prompt_ids"],
            "prompt_length": scored.tokens["prompt_length"],
            "response_ids": scored.tokens["response_ids"][rows, pair],
            "response_length": scored.tokens["response_length"][rows, pair],
            "behaviour_logprobs": scored.behaviour_logprobs[rows, pair],
            "ref_logprobs": scored.ref_logprobs[rows, pair],
            "weight": (~tied).float(),
        }

    def loss(self, policy: Policy, rows: Tensors, metrics: Metrics) -> torch.Tensor:
        logprobs = policy(**{name: rows[name] for name in TOKEN_FIELDS}, temperature=self.config.temperature)
        mask = length_mask(rows["response_length"], logprobs.shape[-1])
        logratio = sequence_sum(logprobs - rows["ref_logprobs"], mask)
        losses = preference_loss(logratio[:, 0], logratio[:, 1], self.config.beta, self.config.loss_type)
        weight = rows["weight"]
        loss = (losses * weight).sum()

        margin = self.config.beta * (logratio[:, 0] - logratio[:, 1]).detach()
        metrics.mean("loss/policy", loss.detach(), weight.sum())
        metrics.mean("dpo/margin", (margin * weight).sum(), weight.sum())
        metrics.mean("dpo/accuracy", ((margin > 0) * weight).sum(), weight.sum())
        policy_metrics(metrics, logprobs, rows["behaviour_logprobs"], mask)
        return loss


def main() -> None:
    run_algorithm(OnlineDPOConfig, OnlineDPO)


if __name__ == "__main__":
    run_script(main)
