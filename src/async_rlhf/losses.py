"""Losses and estimators as pure functions of tensors: no model, no configuration, no I/O.

Log-probabilities are of the sampled tokens, at the sampling temperature, `[batch, response]`; `mask` has the same shape
and is True at response tokens (the first end-of-sequence token included). Losses come back a unit (pair, sequence or
token), unreduced: the trainer divides by the number of units that a mini-batch holds over all ranks and accumulation steps.
"""

import torch
import torch.nn.functional as F

MAX_LOG_RATIO = 20.0


def sequence_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum over the response tokens: `[batch, response] -> [batch]`. Masked-out values may be anything, NaN included."""
    return torch.where(mask, values, 0.0).sum(-1)


def select_pairs(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Best against worst of the k samples of each prompt.

    `scores: [prompts, k]` gives (chosen, rejected, tied), each `[prompts]`: indices into k and whether all k scores are
    equal, in which case the pair teaches nothing. Of equal best (worst) scores the first sample is taken.
    """
    best, worst = scores.max(-1), scores.min(-1)
    return best.indices, worst.indices, best.values == worst.values


def preference_loss(
    chosen_logratio: torch.Tensor, rejected_logratio: torch.Tensor, beta: float, loss_type: str = "sigmoid"
) -> torch.Tensor:
    """Loss a pair, `[pairs]`, from each side's sequence log-ratio log π(y|x) − log π_ref(y|x), `[pairs]`.

    sigmoid: −log σ(β·h), h = chosen − rejected (Rafailov et al. 2023, eq. 7).
    ipo: (h − 1/(2β))² (Azar et al. 2023, eq. 17); h sums over tokens, as in the paper.
    """
    margin = chosen_logratio - rejected_logratio
    if loss_type == "sigmoid":
        return -F.logsigmoid(beta * margin)
    if loss_type == "ipo":
        return (margin - 1 / (2 * beta)).square()
    raise ValueError(f"loss_type {loss_type!r}: choose 'sigmoid' or 'ipo'")


def penalize_missing_eos(
    scores: torch.Tensor, finished: torch.Tensor, penalty: float | None = None, replacement: float | None = None
) -> torch.Tensor:
    """Scores `[batch]` of responses, of which `finished: [batch]` ended with an end-of-sequence token.

    Without one, `penalty` is subtracted, or `replacement` stands in for the score (the paper's −1, which rewards a response
    that would have scored less: prefer the penalty).
    """
    if penalty is not None:
        scores = torch.where(finished, scores, scores - penalty)
    if replacement is not None:
        scores = torch.where(finished, scores, torch.full_like(scores, replacement))
    return scores


def importance_stats(current: torch.Tensor, behaviour: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """How far the current policy has moved from the one that sampled. All `[batch, response]` or `[batch]` before reduction.

    `ratio`: π/μ a token; `approx_kl`: the k3 estimate of KL(μ‖π) a token, r − 1 − log r (Schulman 2020), whose mean over
    tokens drawn from μ is unbiased; `sequence_log_ratio`: Σ log π/μ, `[batch]`, from which the effective sample size is taken.
    """
    log_ratio = torch.where(mask, current - behaviour, 0.0)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return {"ratio": ratio, "approx_kl": ratio - 1 - log_ratio, "sequence_log_ratio": log_ratio.sum(-1)}


def effective_sample_share(log_weights: torch.Tensor) -> torch.Tensor:
    """(Σw)² / (n·Σw²) in (0, 1], for importance weights w = exp(log_weights), `[n]` (Kish 1965). 1 means on-policy."""
    weights = (log_weights - log_weights.max()).exp()
    return weights.sum().square() / (len(weights) * weights.square().sum())
