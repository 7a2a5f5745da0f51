"""Bias and variance of every off-policy correction of Online DPO on a toy that is enumerated, without sampling noise.

    python benchmarks/off_policy_pairs.py        # a second on one core; prints the tables of docs/off_policy.md

Three tokens, one of which ends a response; at most two tokens; a table of logits for a policy; a table of rewards. There are 7
responses, so all 7^k groups of k samples can be listed: the expectation and the covariance of a group's gradient are sums.
The target is the expected gradient of groups drawn from the policy itself. The stale policy is the same one a few steps of
(exact, on-policy) gradient descent ago. Losses, selection and weights are the trainer's own functions.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch

from async_rlhf.losses import importance_stats, pair_log_weights, pair_weights, preference_loss, select_pairs, sequence_sum

BETA = 0.1
END, WIDTH = 0, 2
RESPONSES = [(END,), *((first, second) for first in (1, 2) for second in (0, 1, 2))]
REWARDS = (0.0, 0.7, 1.5, -0.6, 0.3, -1.0, 2.0)  # one a response, all different: only k equal samples tie
TRAINED_STEPS, LEARNING_RATE = 6, 20.0
STALENESS = (1, 4)
GROUPS = 64


@dataclass(frozen=True)
class Correction:
    """One row of the table: `off_policy_correction` and `pair_weight_cap`."""

    name: str
    cap: float | None = None

    def __str__(self) -> str:
        return self.name if self.name == "none" else f"{self.name}, cap {'none' if self.cap is None else f'{self.cap:g}'}"


CORRECTIONS = {
    2: [
        Correction("none"),
        Correction("sequence"),
        Correction("sequence", 3.0),
        Correction("sequence", 2.0),
        Correction("token_mean"),
        Correction("token_mean", 2.0),
        Correction("mask", 2.0),
    ],
    3: [Correction("none"), Correction("sequence"), Correction("sequence", 2.0), Correction("group"), Correction("group", 2.0)],
}


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """Token log-probabilities of every response under `logits [context, token]`, context 0 being the start: `[7, 2]`. What a
    response of one token has in the second column means nothing."""
    logprobs = logits.log_softmax(-1)
    first = torch.tensor([response[0] for response in RESPONSES])
    second = torch.tensor([response[-1] for response in RESPONSES])
    return torch.stack([logprobs[0, first], logprobs[first, second]], -1)


def response_mask() -> torch.Tensor:
    return torch.arange(WIDTH) < torch.tensor([[len(response)] for response in RESPONSES])


def groups(k: int) -> torch.Tensor:
    """Every group of k samples, as indices of responses: `[7^k, k]`."""
    return torch.cartesian_prod(*[torch.arange(len(RESPONSES))] * k)


def probabilities(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Probability of every group under the policy: `[7^k]`."""
    return sequence_sum(log_probabilities(logits), response_mask()).exp()[groups(k)].prod(-1)


def group_gradients(policy: torch.Tensor, stale: torch.Tensor, reference: torch.Tensor, k: int, correction: Correction) -> torch.Tensor:
    """Gradient in the policy's logits of every group's weighted loss, `[7^k, 9]`; a tied group's is 0."""
    samples, mask = groups(k), response_mask()
    chosen, rejected, tied = select_pairs(torch.tensor(REWARDS, dtype=policy.dtype)[samples])
    pair = samples.gather(1, torch.stack([chosen, rejected], 1))
    weighed = samples if correction.name == "group" else pair

    def losses(logits: torch.Tensor) -> torch.Tensor:
        current = log_probabilities(logits)
        logratio = sequence_sum(current - log_probabilities(reference), mask)[pair]
        loss = preference_loss(logratio[:, 0], logratio[:, 1], BETA) * ~tied
        if correction.name == "none":
            return loss
        per_token = correction.name == "token_mean"
        log_weights = pair_log_weights(current[weighed], log_probabilities(stale)[weighed], mask[weighed], per_token)
        return loss * pair_weights(log_weights, correction.cap, drop=correction.name == "mask")

    return torch.autograd.functional.jacobian(losses, policy, vectorize=True).flatten(1)


def moments(probability: torch.Tensor, gradients: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Mean `[9]` and trace of the covariance of a group's gradient, of groups drawn with `probability`."""
    mean = probability @ gradients
    return mean, float(probability @ gradients.square().sum(-1) - mean.square().sum())


def on_policy(policy: torch.Tensor, reference: torch.Tensor, k: int) -> tuple[torch.Tensor, float]:
    return moments(probabilities(policy, k), group_gradients(policy, policy, reference, k, Correction("none")))


def policies() -> list[torch.Tensor]:
    """Logits after 0, 1, … `TRAINED_STEPS` steps of gradient descent on the exact on-policy gradient for k = 2, from the reference."""
    steps = [torch.tensor([[0.5, 0.0, 0.3], [0.2, -0.4, 0.1], [0.0, 0.6, -0.5]], dtype=torch.float64)]
    for _ in range(TRAINED_STEPS):
        steps.append(steps[-1] - LEARNING_RATE * on_policy(steps[-1], steps[0], 2)[0].view_as(steps[0]))
    return steps


def study(k: int, behind: int) -> dict[str, dict[str, float]]:
    """By correction, for a stale policy so many steps `behind`:

    bias: ‖mean − target‖ / ‖target‖; cosine of mean and target; variance of a group's gradient, on-policy = 1; error of a mean
    over `GROUPS` groups, its root mean square distance to the target / ‖target‖.
    """
    steps = policies()
    policy, stale, reference = steps[-1], steps[-1 - behind], steps[0]
    target, target_variance = on_policy(policy, reference, k)
    rows = {"on-policy": (target, target_variance)}
    for correction in CORRECTIONS[k]:
        rows[str(correction)] = moments(probabilities(stale, k), group_gradients(policy, stale, reference, k, correction))
    norm = target.norm()
    return {
        name: {
            "bias": float((mean - target).norm() / norm),
            "cosine": float(mean @ target / (mean.norm() * norm)),
            "variance": variance / target_variance,
            "error": float(((mean - target).square().sum() + variance / GROUPS).sqrt() / norm),
        }
        for name, (mean, variance) in rows.items()
    }


def divergence(behind: int) -> dict[str, float]:
    """KL(μ‖π) of a response, in nats, and the effective share (E w)² / E w² of the exact weights of pairs."""
    steps = policies()
    mask, current, behaviour = response_mask(), log_probabilities(steps[-1]), log_probabilities(steps[-1 - behind])
    log_ratio = importance_stats(current, behaviour, mask)["sequence_log_ratio"]
    probability = sequence_sum(behaviour, mask).exp()
    return {"kl": float(-probability @ log_ratio), "ess": float(1 / (probability @ (2 * log_ratio).exp()) ** 2)}


def length_share(chi_squared: float, length: int) -> float:
    """Effective share of the exact weights of pairs whose 2 · `length` tokens are independent, each with χ²(π‖μ) = E r² − 1: their
    second moments multiply, so it is (1 + χ²)^(−2·length)."""
    return (1 + chi_squared) ** (-2 * length)


def kept_mean(share: float, cap: float) -> float:
    """E min(w, cap) for a log-normal w of mean 1 whose effective share is `share`: σ² = −log share of log w, so that under μ
    log w has the mean −σ²/2, and under π, where w weighs it, σ²/2."""
    variance = -math.log(share)
    below = NormalDist(variance / 2, variance**0.5).cdf(math.log(cap))
    return below + cap * (1 - NormalDist(-variance / 2, variance**0.5).cdf(math.log(cap)))


def bias_table() -> str:
    lines = []
    for k in CORRECTIONS:
        results = [study(k, behind) for behind in STALENESS]
        head = " | ".join(f"bias, {behind} behind | cosine | variance | error" for behind in STALENESS)
        lines += ["" for _ in lines[:1]] + [f"| k = {k} | {head} |", "|---" * (1 + 4 * len(STALENESS)) + "|"]
        for name in results[0]:
            cells = [f"{result[name][column]:.3f}" for result in results for column in ("bias", "cosine", "variance", "error")]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def length_table() -> str:
    lengths = (2, 10, 53, 200, 1000)
    lines = [f"| χ² a token | {' | '.join(f'{length} tokens' for length in lengths)} |", "|---" * (1 + len(lengths)) + "|"]
    for chi_squared in (1e-4, 1e-3, 1e-2):
        lines.append(f"| {chi_squared:g} | {' | '.join(f'{length_share(chi_squared, length):.3f}' for length in lengths)} |")
    return "\n".join(lines)


def cap_table() -> str:
    shares = (0.9, 0.5, 0.2, 0.1, 0.01)
    lines = [f"| effective share | {' | '.join(f'{share:g}' for share in shares)} |", "|---" * (1 + len(shares)) + "|"]
    for cap in (2.0, 5.0):
        lines.append(f"| mean weight under a cap of {cap:g} | {' | '.join(f'{kept_mean(share, cap):.2f}' for share in shares)} |")
    return "\n".join(lines)


def main() -> None:
    for behind in STALENESS:
        apart = divergence(behind)
        print(f"{behind} behind: KL(μ‖π) {apart['kl']:.4f} nats a response, effective share of the pairs' weights {apart['ess']:.3f}")
    print(f"\n{bias_table()}\n\n{length_table()}\n\n{cap_table()}")


if __name__ == "__main__":
    main()
