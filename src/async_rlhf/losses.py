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
    chosen_logratio: torch.Tensor,
    rejected_logratio: torch.Tensor,
    beta: float,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Loss a pair, `[pairs]`, from each side's sequence log-ratio log π(y|x) − log π_ref(y|x), `[pairs]`; h = chosen − rejected and
    ε = `label_smoothing`, the probability that a label is wrong, in [0, ½).

    sigmoid: L(h) = −log σ(β·h) (Rafailov et al. 2023, eq. 7); with ε conservative: (1 − ε)·L(h) + ε·L(−h) (Mitchell 2023).
    ipo: (h − 1/(2β))² (Azar et al. 2023, eq. 17); h sums over tokens, as in the paper.
    hinge: max(0, 1 − β·h) (SLiC, Zhao et al. 2023, with β·h for the log-likelihood difference, as in Liu et al. 2023).
    robust: ((1 − ε)·L(h) − ε·L(−h)) / (1 − 2ε), whose mean over labels flipped with probability ε is L(h) (Chowdhury et al.
        2024). Where ε is above 0 it has no lower bound: its slope in h stays at or above β·ε/(1 − 2ε), however large h.
    """
    margin = chosen_logratio - rejected_logratio
    if loss_type in ("sigmoid", "robust"):
        right, flipped = -F.logsigmoid(beta * margin), -F.logsigmoid(-beta * margin)
        if loss_type == "robust":
            return ((1 - label_smoothing) * right - label_smoothing * flipped) / (1 - 2 * label_smoothing)
        return (1 - label_smoothing) * right + label_smoothing * flipped if label_smoothing else right
    if loss_type == "ipo":
        return (margin - 1 / (2 * beta)).square()
    if loss_type == "hinge":
        return F.relu(1 - beta * margin)
    raise ValueError(f"loss_type {loss_type!r}: choose 'sigmoid', 'ipo', 'hinge' or 'robust'")


def pair_log_weights(current: torch.Tensor, behaviour: torch.Tensor, mask: torch.Tensor, per_token: bool = False) -> torch.Tensor:
    """Logarithm of each pair's importance weight, `[pairs]`, detached, clamped to ±`MAX_LOG_RATIO`.

    `current`, `behaviour` and `mask` are `[pairs, samples, response]`. Samples of a prompt are independent, so the density ratio
    of what was drawn is the product of π/μ over all tokens of all samples. Give it the k samples that the pair was chosen from
    and it is exact; the two sides alone suffice for k = 2.

    `per_token` averages a sample's token log-ratios instead of summing them (the product of the samples' geometric means): the
    exact ratio with the exponent 1/length, as Shimodaira (2000) tempers weights. GSPO's ratio is of this form (Zheng et al. 2025),
    and WPO averages likewise, of a probability instead of a ratio (Zhou et al. 2024, eq. 2).
    """
    log_ratio = sequence_sum(current.detach() - behaviour, mask)
    if per_token:
        log_ratio = log_ratio / mask.sum(-1).clamp(min=1)
    return log_ratio.sum(-1).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def pair_weights(log_weights: torch.Tensor, cap: float | None = None, drop: bool = False) -> torch.Tensor:
    """What the loss of each pair is multiplied by, `[pairs]`, from `pair_log_weights`.

    The weight w truncated at `cap`, min(w, cap) (Ionides 2008); without a `cap`, w itself. `drop`: 1 inside the band
    1/cap ≤ w ≤ cap and 0 outside.
    """
    weights = log_weights.exp()
    if drop:
        return ((weights <= cap) & (weights * cap >= 1)).to(weights.dtype)
    return weights if cap is None else weights.clamp(max=cap)


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
