"""Losses and estimators as pure functions of tensors: no model, no configuration, no I/O.

Log-probabilities are of the sampled tokens, at the sampling temperature, `[batch, response]`; `mask` has the same shape
and is True at response tokens (the first end-of-sequence token included). Losses come back a unit (pair, sequence or
token), unreduced: the trainer divides by the number of units that a mini-batch holds over all ranks and accumulation steps.
"""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from async_rlhf.advantages import leave_one_out

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


# -- policy gradient ----------------------------------------------------------------------------------------------------------


def kl_estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, mask: torch.Tensor, kind: str = "k1") -> torch.Tensor:
    """Estimate a token of KL(π‖π_ref), `[..., R]`, 0 outside the mask, from tokens sampled by π; ℓ = log π − log π_ref (Schulman 2020).

    | kind | value | mean value over π | mean gradient as a loss term, over π |
    |---|---|---|---|
    | k1 | ℓ | KL(π‖π_ref) | 0: a loss of it teaches nothing. In the reward it is the right one |
    | k2 | ℓ²/2 | biased, by third order in ℓ | that of KL(π‖π_ref): the right one for a loss term |
    | k3 | e^−ℓ − 1 + ℓ | KL(π‖π_ref), never negative | that of KL(π_ref‖π): equal to first order in ℓ (GRPO's) |

    (Tang & Munos 2025 on the gradients.) The gradient is that of each token's divergence given its prefix: as a loss term none of them
    credits a token with the divergence of later ones, as k1 in the reward does. Samples of another policy than π need a ratio too.
    """
    log_ratio = torch.where(mask, logprobs - ref_logprobs, 0.0)
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio.square() / 2
    if kind == "k3":
        log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return torch.expm1(-log_ratio) + log_ratio
    raise ValueError(f"KL estimator {kind!r}: choose 'k1', 'k2' or 'k3'")


class PolicyLoss(NamedTuple):
    """`loss` a unit; `clipped`: its gradient was cut by `clip_range`; `corrected`: its weight was truncated, or it was dropped."""

    loss: torch.Tensor
    clipped: torch.Tensor
    corrected: torch.Tensor


def policy_loss(
    logprobs: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    proximal: torch.Tensor | None = None,
    surrogate: Literal["reinforce", "clip", "cispo"] = "clip",
    ratio_level: Literal["token", "sequence"] = "token",
    clip_range: tuple[float, float] = (0.2, 0.2),
    correction: Literal["none", "truncate_token", "truncate_sequence", "mask_token", "mask_sequence"] = "none",
    correction_range: tuple[float, float] = (0.0, 2.0),
) -> PolicyLoss:
    """The policy-gradient loss −w·f(r, A), from the log-probabilities of π (`logprobs`, the only one with a gradient), of μ that
    sampled (`behaviour`), and of a policy between them (`proximal`), all `[..., R]`. `advantages` are a token, `[..., R]`, or a
    sequence, `[...]`, and then every token's. A unit is a token, `[..., R]`, or, with `ratio_level` "sequence", a sequence, `[...]`.

    r is the ratio that carries the gradient, π/proximal, or π/μ without a proximal policy; of a sequence it is the product over its
    tokens. `surrogate` f:
      reinforce  A·log π: no ratio (Williams 1992)
      clip       min(r·A, clip(r, 1 − low, 1 + high)·A) (PPO, Schulman et al. 2017, eq. 7; of sequences: the Proximal RLOO of
                 Noukhovitch et al. 2024). An infinite range is plain importance sampling
      cispo      sg[clip(r, 1 − low, 1 + high)]·A·log π: no unit loses its gradient (MiniMax-M1 2025, section 3.1)

    w is a weight without gradient for what r leaves uncorrected: proximal/μ, and for `reinforce` without a proximal policy π/μ. Of a
    token, or of the whole sequence (then every token's). `correction` says what becomes of it, with `correction_range` (low, high):
      none       w = 1
      truncate   w clamped into the range (Ionides 2008; IMPALA's, Espeholt et al. 2018; TIS, Yao et al. 2025); with high = inf the
                 weight is exact, and with `clip` and a proximal policy it is decoupled PPO (Hilton et al. 2021)
      mask       w inside the range, 0 outside (IcePop, MIS). Without a proximal policy r already is the whole ratio under `clip`
                 and `cispo`: there w is 1 inside. What is dropped still counts as a unit: its part of the sum is 0

    Log-ratios are clamped to ±20 before exp. Raises ValueError for a combination that has no meaning.
    """
    low, high = clip_range
    by_sequence = ratio_level == "sequence"
    if by_sequence and correction.endswith("_token"):
        raise ValueError(f"correction {correction!r} weighs tokens, but ratio_level 'sequence' has one loss a sequence")
    if by_sequence and advantages.dim() != mask.dim() - 1:
        raise ValueError("ratio_level 'sequence' needs one advantage a sequence, not one a token")
    if advantages.dim() == mask.dim() - 1 and not by_sequence:
        advantages = advantages[..., None]

    def units(values: torch.Tensor) -> torch.Tensor:
        return sequence_sum(values, mask) if by_sequence else torch.where(mask, values, 0.0)

    advantages = advantages if by_sequence else torch.where(mask, advantages, 0.0)
    ratio = units(logprobs - (behaviour if proximal is None else proximal)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    within = ratio.clamp(1 - low, 1 + high)
    if surrogate == "reinforce":
        gain, clipped = advantages * units(logprobs), torch.zeros_like(ratio, dtype=torch.bool)
    elif surrogate == "clip":
        gain, clipped = torch.minimum(ratio * advantages, within * advantages), within * advantages < ratio * advantages
    elif surrogate == "cispo":
        gain, clipped = within.detach() * advantages * units(logprobs), within != ratio
    else:
        raise ValueError(f"surrogate {surrogate!r}: choose 'reinforce', 'clip' or 'cispo'")

    if correction == "none":
        return PolicyLoss(-gain, clipped, torch.zeros_like(clipped))
    target = logprobs.detach() if proximal is None else proximal
    weight, outside = _correction_weight(target, behaviour, mask, correction, correction_range)
    if surrogate != "reinforce" and proximal is None:
        if correction.startswith("truncate"):
            raise ValueError(f"correction {correction!r} with surrogate {surrogate!r} needs a proximal policy: without, the weight is 1")
        weight = (~outside).to(gain.dtype)
    if correction.endswith("_sequence") and not by_sequence:
        weight, outside = weight[..., None], outside[..., None] & mask
    return PolicyLoss(-weight * gain, clipped, outside)


def _correction_weight(
    target: torch.Tensor, behaviour: torch.Tensor, mask: torch.Tensor, correction: str, limits: tuple[float, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights target/behaviour after the correction and which of them it changed: `[..., R]` a token, `[...]` a sequence."""
    kind, _, level = correction.partition("_")
    if kind not in ("truncate", "mask") or level not in ("token", "sequence"):
        raise ValueError(f"correction {correction!r}: 'none', or 'truncate' or 'mask' with '_token' or '_sequence'")
    log_weight = torch.where(mask, target - behaviour, 0.0)
    if level == "sequence":
        log_weight = log_weight.sum(-1)
    weight = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    outside = (weight < limits[0]) | (weight > limits[1])
    return weight.clamp(*limits) if kind == "truncate" else torch.where(outside, 0.0, weight), outside


def interpolate_proximal(logprobs: torch.Tensor, behaviour: torch.Tensor, share: torch.Tensor | float) -> torch.Tensor:
    """A proximal policy without a forward of its own: log μ + share · (log π − log μ), `[..., R]`, no gradient (A-3PO, Li et al. 2025).

    `share` in [0, 1], a number or broadcastable: optimizer steps from the sampling snapshot to the proximal policy (the start of the
    update), over those to π. With `policy_loss`'s clip, r = (π/μ)^(1 − share) and w = (π/μ)^share: exact where nothing is clipped,
    and a trust region around μ that widens with the batch's age.
    """
    return (behaviour + share * (logprobs - behaviour)).detach()


def copg_loss(scores: torch.Tensor, log_ratio: torch.Tensor, beta: float) -> torch.Tensor:
    """Contrastive policy gradient (Flet-Berliac et al. 2024) of k samples a prompt: `[..., k]`, a loss a sequence.

    `log_ratio [..., k]` = Σ log π − log π_ref over the response, with gradient. Of the pair (i, j) the paper maximises
    (R_i − R_j − β/2·(ρ_i − ρ_j))·(ρ_i − ρ_j), ρ the log-ratio: −1/(2β) times the square of R_i − R_j − β·(ρ_i − ρ_j), up to a
    constant. Summed over pairs, divided by k − 1, it is Σ_i ρ_i·(LOO(R)_i − β/2·LOO(ρ)_i). On-policy its mean gradient is RLOO's with
    the KL in the reward; whoever sampled, as long as every response can come up, its one optimum is the KL-regularised one.
    """
    return -log_ratio * (leave_one_out(scores) - beta / 2 * leave_one_out(log_ratio))


def supervised_loss(logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """−Σ log π over the response, `[..., R] -> [...]`: of the best of n samples (`select_pairs` finds it), best-of-n's loss."""
    return -sequence_sum(logprobs, mask)


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, clip: float | None = 0.2
) -> tuple[torch.Tensor, torch.Tensor]:
    """½·max((V − G)², (V_clip − G)²) a step and whether the clip decided it, `[..., T]` each; V_clip stays within `clip` of the
    value before the update (PPO2; Huang et al. 2022, detail 9). `mask` is that of `step_mask`; `clip=None` is the plain square."""
    values, old_values, returns = (torch.where(mask, x, 0.0) for x in (values, old_values, returns))
    squares = (values - returns).square()
    if clip is None:
        return squares / 2, torch.zeros_like(mask)
    limited = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    return torch.maximum(squares, limited) / 2, limited > squares
