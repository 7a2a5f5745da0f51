"""Bias and variance of every off-policy correction, computed exactly on a policy small enough to enumerate.

    python benchmarks/off_policy_bias.py     # prints the table of docs/off_policy.md, in seconds

The policy is a softmax table over three tokens (eos, a, b) and prefixes of at most one token: 7 responses, of which some have no
eos. Two samples of a stale policy μ, a leave-one-out baseline, the loss of `losses.py`: summed over all 49 pairs with their
probability, its gradient has no sampling noise left, and is compared with the gradient of the objective itself.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch

from async_rlhf.advantages import leave_one_out
from async_rlhf.losses import copg_loss, interpolate_proximal, policy_loss, sequence_sum

EOS, A, B = range(3)
RESPONSES = [[EOS], *([first, second] for first, second in product((A, B), (EOS, A, B)))]
TOKENS = torch.tensor([[*response, EOS][:2] for response in RESPONSES])  # padded with eos: only the mask tells
MASK = torch.tensor([[True, len(response) == 2] for response in RESPONSES])
PREFIXES = torch.stack([torch.zeros(len(RESPONSES), dtype=torch.long), TOKENS[:, 0]], 1)  # row of the table: nothing, a or b

SCORES = torch.tensor([0.0, 1.0, -0.5, 0.5, 2.0, -1.0, 0.3], dtype=torch.float64)
KL_COEF = 0.2
POLICY = torch.tensor([[-0.2, 0.5, 0.1], [0.6, -0.3, 0.2], [0.4, 0.1, -0.6]], dtype=torch.float64)
REFERENCE = torch.tensor([[0.1, 0.2, 0.0], [0.2, 0.0, 0.3], [0.0, 0.3, -0.1]], dtype=torch.float64)
DRIFT = torch.tensor([[-0.5, 1.0, -0.4], [1.0, -0.7, -0.2], [0.8, -0.9, 0.2]], dtype=torch.float64)
STALENESS = {"near": 0.25, "far": 1.0}  # μ's table is the policy's minus so much of the drift
INF = float("inf")


def token_logprobs(table: torch.Tensor) -> torch.Tensor:
    """log-probability of every token of every response, `[7, 2]`; what stands in the padding means nothing."""
    return table.log_softmax(-1)[PREFIXES, TOKENS]


def behaviour_table(staleness: str) -> torch.Tensor:
    return POLICY - STALENESS[staleness] * DRIFT


def true_gradient(policy: torch.Tensor = POLICY) -> torch.Tensor:
    """Of E_π[score] − KL_COEF · KL(π‖π_ref) with respect to the policy's table, `[9]`."""
    table = policy.clone().requires_grad_()
    logprobs = sequence_sum(token_logprobs(table), MASK)
    reference = sequence_sum(token_logprobs(REFERENCE), MASK)
    objective = (logprobs.exp() * (SCORES - KL_COEF * (logprobs - reference))).sum()
    return torch.autograd.grad(objective, table)[0].flatten()


@dataclass
class Pairs:
    """Two samples of a prompt, all 49 ways to draw them: token tensors `[49, 2, 2]`, scores `[49, 2]`, `probability [49]` under μ."""

    current: torch.Tensor
    behaviour: torch.Tensor
    proximal: torch.Tensor
    reference: torch.Tensor
    mask: torch.Tensor
    scores: torch.Tensor
    probability: torch.Tensor

    @classmethod
    def of(cls, table: torch.Tensor, behaviour: torch.Tensor) -> "Pairs":
        """The proximal policy is half-way between μ and π, as after half the optimizer steps."""
        draws = torch.cartesian_prod(torch.arange(len(RESPONSES)), torch.arange(len(RESPONSES)))
        policies = (table, behaviour, (table.detach() + behaviour) / 2, REFERENCE)
        probability = sequence_sum(token_logprobs(behaviour), MASK).exp()
        return cls(*(token_logprobs(t)[draws] for t in policies), MASK[draws], SCORES[draws], probability[draws].prod(-1))

    def advantages(self, sampled: bool = False) -> torch.Tensor:
        """RLOO's, with the KL in the reward taken of π as it trains, or (`sampled`) of μ, whose log-probabilities come for free."""
        policy = self.behaviour if sampled else self.current.detach()
        return leave_one_out(self.scores - KL_COEF * sequence_sum(policy - self.reference, self.mask))


def surrogate(sampled: bool = False, decoupled: bool = False, share: float | None = None, **settings) -> Callable[[Pairs], torch.Tensor]:
    """A row of the table: `policy_loss` with `settings`, summed over tokens, mean over the two samples."""

    def loss(pairs: Pairs) -> torch.Tensor:
        proximal = pairs.proximal if decoupled else None
        if share is not None:
            proximal = interpolate_proximal(pairs.current, pairs.behaviour, share)
        units = policy_loss(pairs.current, pairs.behaviour, pairs.advantages(sampled), pairs.mask, proximal=proximal, **settings).loss
        return units.flatten(1).sum(-1) / 2

    return loss


def contrastive(pairs: Pairs) -> torch.Tensor:
    return copg_loss(pairs.scores, sequence_sum(pairs.current - pairs.reference, pairs.mask), KL_COEF).mean(-1)


TRUNCATE = {"surrogate": "reinforce", "correction_range": (0.0, 1.5)}
BAND = {"surrogate": "reinforce", "correction_range": (0.5, 1.5)}
ROWS: dict[str, Callable[[Pairs], torch.Tensor]] = {
    "no correction (`reinforce`)": surrogate(surrogate="reinforce"),
    "sequence weight, exact": surrogate(surrogate="reinforce", correction="truncate_sequence", correction_range=(0.0, INF)),
    "the same, KL in the reward of μ": surrogate(True, surrogate="reinforce", correction="truncate_sequence", correction_range=(0.0, INF)),
    "sequence weight, truncated at 1.5": surrogate(**TRUNCATE, correction="truncate_sequence"),
    "sequences outside 0.5 … 1.5 masked": surrogate(**BAND, correction="mask_sequence"),
    "token weight, untruncated": surrogate(surrogate="reinforce", correction="truncate_token", correction_range=(0.0, INF)),
    "token weight, truncated at 1.5": surrogate(**TRUNCATE, correction="truncate_token"),
    "tokens outside 0.5 … 1.5 masked": surrogate(**BAND, correction="mask_token"),
    "`cispo`, token ratio at most 1.2": surrogate(surrogate="cispo", clip_range=(1.0, 0.2)),
    "`clip` 0.2, token ratio (PPO)": surrogate(surrogate="clip"),
    "`clip` 0.2, sequence ratio (Proximal RLOO)": surrogate(surrogate="clip", ratio_level="sequence"),
    "decoupled, token, untruncated": surrogate(decoupled=True, correction="truncate_token", correction_range=(0.0, INF)),
    "decoupled, token, truncated at 1.5": surrogate(decoupled=True, correction="truncate_token", correction_range=(0.0, 1.5)),
    "decoupled, sequence, untruncated": surrogate(
        decoupled=True, ratio_level="sequence", correction="truncate_sequence", correction_range=(0.0, INF)
    ),
    "decoupled, token, proximal interpolated": surrogate(share=0.5, correction="truncate_token", correction_range=(0.0, INF)),
    "CoPG": contrastive,
}


def expected_gradient(
    loss: Callable[[Pairs], torch.Tensor], behaviour: torch.Tensor, policy: torch.Tensor = POLICY
) -> tuple[torch.Tensor, float]:
    """Mean over μ of the ascent direction, `[9]`, and the trace of its covariance, of one prompt with two samples."""
    ascent = -torch.autograd.functional.jacobian(lambda table: loss(Pairs.of(table, behaviour)), policy, vectorize=True).flatten(1)
    probability = Pairs.of(policy, behaviour).probability
    mean = probability @ ascent
    return mean, float(probability @ (ascent - mean).square().sum(-1))


def divergence(behaviour: torch.Tensor) -> tuple[float, float]:
    """KL(μ‖π) in nats, and the effective sample share of μ's responses, 1 / E_μ[(π/μ)²]."""
    logprobs, sampled = (sequence_sum(token_logprobs(table), MASK) for table in (POLICY, behaviour))
    return float((sampled.exp() * (sampled - logprobs)).sum()), float(1 / (2 * logprobs - sampled).exp().sum())


def table() -> Iterator[str]:
    """Lines of the Markdown table: bias ‖E[g] − ∇J‖ / ‖∇J‖, variance tr Cov[g] / ‖∇J‖², on-policy and at each staleness."""
    behaviours = {"on-policy": POLICY} | {name: behaviour_table(name) for name in STALENESS}
    heads = []
    for name, behaviour in behaviours.items():
        kl, share = divergence(behaviour)
        heads += [f"{name}{'' if behaviour is POLICY else f' (KL {kl:.2f}, ESS {share:.2f})'}: bias", "variance"]
    yield "| correction | " + " | ".join(heads) + " |"
    yield "|---" * (len(heads) + 1) + "|"
    gradient = true_gradient()
    for name, loss in ROWS.items():
        cells = []
        for behaviour in behaviours.values():
            mean, variance = expected_gradient(loss, behaviour)
            cells += [f"{float((mean - gradient).norm() / gradient.norm()):.3f}", f"{variance / float(gradient.square().sum()):.2f}"]
        yield f"| {name} | " + " | ".join(cells) + " |"


def main() -> None:
    print("\n".join(table()))


if __name__ == "__main__":
    main()
