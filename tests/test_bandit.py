"""Expected gradients by enumeration, on the policy of benchmarks/off_policy_bias.py: no sampling noise, no tolerance for bias."""

import math
from pathlib import Path

import pytest
import torch

from async_rlhf.advantages import gae, step_mask, token_rewards
from async_rlhf.losses import kl_estimate, policy_loss, sequence_sum
from benchmarks import off_policy_bias as bandit

DOCUMENT = Path(__file__).parent.parent / "docs" / "off_policy.md"
BEHAVIOURS = ["on-policy", *bandit.STALENESS]


def behaviour_table(name: str) -> torch.Tensor:
    return bandit.POLICY if name == "on-policy" else bandit.behaviour_table(name)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-8)


def test_the_responses_are_all_there_are():
    for table in (bandit.POLICY, bandit.behaviour_table("far")):
        assert sequence_sum(bandit.token_logprobs(table), bandit.MASK).exp().sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize("row", bandit.ROWS)
def test_on_policy_every_loss_has_the_gradient_of_the_objective(row):
    gradient, _ = bandit.expected_gradient(bandit.ROWS[row], bandit.POLICY)
    assert_same(gradient, bandit.true_gradient())


@pytest.mark.parametrize("staleness", bandit.STALENESS)
def test_exact_sequence_weights_have_no_bias_however_stale(staleness):
    """So does a sequence ratio that nothing clips, which differentiates the ratio instead of the logarithm."""
    exact = bandit.ROWS["sequence weight, exact"]
    unclipped = bandit.surrogate(surrogate="clip", ratio_level="sequence", clip_range=(bandit.INF, bandit.INF))
    for loss in (exact, unclipped):
        assert_same(bandit.expected_gradient(loss, bandit.behaviour_table(staleness))[0], bandit.true_gradient())


# -- the bias of the others, in plain floats -------------------------------------------------------------------------------------


def probabilities(table: torch.Tensor) -> list[list[float]]:
    rows = [[math.exp(x) for x in row] for row in table.tolist()]
    return [[x / sum(row) for x in row] for row in rows]


def clipped(ratio: float, advantage: float) -> float:
    """What PPO's clip at 0.2 lets through."""
    return 0.0 if (advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8) else ratio


# What A·∇log π of a token is multiplied with. p: ratios a token π/μ (p), π/prox (q), prox/μ (w); a: the sign of the advantage.
MULTIPLIERS = {
    "no correction (`reinforce`)": lambda p, q, w, t, a: 1.0,
    "sequence weight, exact": lambda p, q, w, t, a: math.prod(p),
    "the same, KL in the reward of μ": lambda p, q, w, t, a: math.prod(p),
    "sequence weight, truncated at 1.5": lambda p, q, w, t, a: min(math.prod(p), 1.5),
    "sequences outside 0.5 … 1.5 masked": lambda p, q, w, t, a: math.prod(p) * (0.5 <= math.prod(p) <= 1.5),
    "token weight, untruncated": lambda p, q, w, t, a: p[t],
    "token weight, truncated at 1.5": lambda p, q, w, t, a: min(p[t], 1.5),
    "tokens outside 0.5 … 1.5 masked": lambda p, q, w, t, a: p[t] * (0.5 <= p[t] <= 1.5),
    "`cispo`, token ratio at most 1.2": lambda p, q, w, t, a: min(p[t], 1.2),
    "`clip` 0.2, token ratio (PPO)": lambda p, q, w, t, a: clipped(p[t], a),
    "`clip` 0.2, sequence ratio (Proximal RLOO)": lambda p, q, w, t, a: clipped(math.prod(p), a),
    "decoupled, token, untruncated": lambda p, q, w, t, a: w[t] * clipped(q[t], a),
    "decoupled, token, truncated at 1.5": lambda p, q, w, t, a: min(w[t], 1.5) * clipped(q[t], a),
    "decoupled, sequence, untruncated": lambda p, q, w, t, a: math.prod(w) * clipped(math.prod(q), a),
    "decoupled, token, proximal interpolated": lambda p, q, w, t, a: p[t] ** 0.5 * clipped(p[t] ** 0.5, a),
    "CoPG": lambda p, q, w, t, a: 1.0,
}


def gradient_in_floats(row: str, behaviour: torch.Tensor) -> list[float]:
    """Σ over pairs of μ(y)·μ(y')·(G(y) − G(y'))·Σ_t m_t·∇log π(y_t), G = score − KL_COEF·log-ratio to the reference."""
    pi, mu, reference = (probabilities(table) for table in (bandit.POLICY, behaviour, bandit.REFERENCE))
    proximal = probabilities((bandit.POLICY + behaviour) / 2)
    steps = [list(zip([0, *response[:-1]], response, strict=True)) for response in bandit.RESPONSES]

    def ratios(over, under, response):
        return [over[prefix][token] / under[prefix][token] for prefix, token in steps[response]]

    sampled = [math.prod(mu[prefix][token] for prefix, token in response) for response in steps]
    penalised = mu if row == "the same, KL in the reward of μ" else pi
    gains = [
        score - bandit.KL_COEF * math.log(math.prod(ratios(penalised, reference, response)))
        for response, score in enumerate(bandit.SCORES.tolist())
    ]
    gradient = [[0.0] * 3 for _ in range(3)]
    for i in range(len(steps)):
        p, q, w = ratios(pi, mu, i), ratios(pi, proximal, i), ratios(proximal, mu, i)
        for j in range(len(steps)):
            advantage = gains[i] - gains[j]
            for t, (prefix, token) in enumerate(steps[i]):
                factor = sampled[i] * sampled[j] * advantage * MULTIPLIERS[row](p, q, w, t, advantage)
                for other in range(3):
                    gradient[prefix][other] += factor * ((other == token) - pi[prefix][other])
    return [x for line in gradient for x in line]


@pytest.mark.parametrize("row", bandit.ROWS)
@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_every_bias_is_the_one_that_enumeration_gives(row, behaviour):
    found, _ = bandit.expected_gradient(bandit.ROWS[row], behaviour_table(behaviour))
    assert found.tolist() == pytest.approx(gradient_in_floats(row, behaviour_table(behaviour)), abs=1e-10)


def test_only_the_exact_weight_is_without_bias_when_far():
    for row, loss in bandit.ROWS.items():
        bias = (bandit.expected_gradient(loss, bandit.behaviour_table("far"))[0] - bandit.true_gradient()).norm()
        assert (bias / bandit.true_gradient().norm() < 1e-9) == (row == "sequence weight, exact"), row


@pytest.mark.parametrize("row", ["CoPG", "no correction (`reinforce`)"])
def test_the_uncorrected_gradient_vanishes_at_the_optimum_whoever_sampled(row):
    """π* ∝ π_ref·exp(score/KL_COEF): there every regularised score is the same, so no comparison of two teaches anything."""
    reference = sequence_sum(bandit.token_logprobs(bandit.REFERENCE), bandit.MASK)
    optimum = (reference + bandit.SCORES / bandit.KL_COEF).softmax(-1)
    first = torch.stack([optimum[bandit.TOKENS[:, 0] == token].sum() for token in range(3)])
    second = [optimum[(bandit.TOKENS[:, 0] == token) & bandit.MASK[:, 1]] for token in (bandit.A, bandit.B)]
    table = torch.stack([first, *second]).log()
    assert_same(bandit.true_gradient(table), torch.zeros(9, dtype=torch.float64))
    gradient, _ = bandit.expected_gradient(bandit.ROWS[row], bandit.behaviour_table("far"), table)
    assert_same(gradient, torch.zeros(9, dtype=torch.float64))


# -- PPO: advantages a token ---------------------------------------------------------------------------------------------------


def exact_values(policy: torch.Tensor, kl: torch.Tensor) -> torch.Tensor:
    """Regularised value of the policy before every token and after the last one, `[7, 3]`; the padding has none."""
    probability = policy.softmax(-1)
    to_go = bandit.SCORES - bandit.KL_COEF * torch.where(bandit.MASK, kl, 0.0)[:, 1]
    after_first = torch.zeros(3, dtype=torch.float64)  # of a, of b
    for response, (first, second) in enumerate(bandit.TOKENS.tolist()):
        if bandit.MASK[response, 1]:
            after_first[first] += probability[first, second] * to_go[response]
    start = sum(
        probability[0, token] * (reward + (bandit.SCORES[0] if token == bandit.EOS else after_first[token]))
        for token, reward in enumerate(-bandit.KL_COEF * (policy.log_softmax(-1) - bandit.REFERENCE.log_softmax(-1))[0])
    )
    values = torch.full((7, 3), float("nan"), dtype=torch.float64)
    values[:, 0] = start
    for response, (first, _) in enumerate(bandit.TOKENS.tolist()):
        values[response, bandit.MASK[response].sum()] = bandit.SCORES[response]
        if bandit.MASK[response, 1]:
            values[response, 1] = after_first[first]
    return values


@pytest.mark.parametrize("score_at", ["last_token", "next_token"])
@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_ppo_with_exact_values_has_the_gradient_of_the_objective(score_at, lam):
    """On-policy, with the KL as a reward a token, whatever λ and wherever the score is given."""
    reference = bandit.token_logprobs(bandit.REFERENCE)
    table = bandit.POLICY.clone().requires_grad_()
    logprobs = bandit.token_logprobs(table)
    kl = (logprobs - reference).detach()
    steps = step_mask(bandit.MASK, score_at)
    values = exact_values(bandit.POLICY, kl)[:, : steps.shape[-1]]
    rewards = token_rewards(bandit.SCORES, kl, bandit.MASK, bandit.KL_COEF, score_at)
    advantages = gae(rewards, values, steps, 1.0, lam)[0][:, :2]
    loss = policy_loss(logprobs, logprobs.detach(), advantages, bandit.MASK).loss.sum(-1)
    probability = sequence_sum(logprobs.detach(), bandit.MASK).exp()
    (gradient,) = torch.autograd.grad(-(probability * loss).sum(), table)
    assert_same(gradient.flatten(), bandit.true_gradient())


def test_a_token_ratio_with_exact_advantages_leaves_the_bias_of_the_prefixes():
    """Stale, unclipped, λ 0: tokens are weighed right, prefixes still come as often as μ writes them. The first token has no such bias."""
    behaviour = bandit.behaviour_table("far")
    table = bandit.POLICY.clone().requires_grad_()
    logprobs, sampled = bandit.token_logprobs(table), bandit.token_logprobs(behaviour)
    kl = (logprobs - bandit.token_logprobs(bandit.REFERENCE)).detach()
    rewards = token_rewards(bandit.SCORES, kl, bandit.MASK, bandit.KL_COEF)
    advantages, _ = gae(rewards, exact_values(bandit.POLICY, kl)[:, :2], bandit.MASK, 1.0, 0.0)
    loss = policy_loss(logprobs, sampled, advantages, bandit.MASK, clip_range=(bandit.INF, bandit.INF)).loss.sum(-1)
    (gradient,) = torch.autograd.grad(-(sequence_sum(sampled, bandit.MASK).exp() * loss).sum(), table)
    true = bandit.true_gradient().view(3, 3)
    prefixes = behaviour[0].softmax(-1) / bandit.POLICY[0].softmax(-1)
    expected = torch.stack([true[0], true[1] * prefixes[bandit.A], true[2] * prefixes[bandit.B]])
    assert_same(gradient, expected)


def test_kl_as_a_loss_term_leaves_out_what_a_token_does_to_later_ones():
    """k2 summed over tokens: the gradient of KL(π‖π_ref) at each prefix, prefixes taken as given. The KL in the reward has the rest."""
    table = bandit.POLICY.clone().requires_grad_()
    logprobs, reference = bandit.token_logprobs(table), bandit.token_logprobs(bandit.REFERENCE)
    probability = sequence_sum(logprobs.detach(), bandit.MASK).exp()
    estimate = kl_estimate(logprobs, reference, bandit.MASK, "k2").sum(-1)
    (found,) = torch.autograd.grad((probability * estimate).sum(), table, retain_graph=True)

    visits = torch.cat([torch.ones(1, dtype=torch.float64), bandit.POLICY[0].softmax(-1)[bandit.A :]])
    divergences = (table.softmax(-1) * (table.log_softmax(-1) - bandit.REFERENCE.log_softmax(-1))).sum(-1)
    (expected,) = torch.autograd.grad((visits * divergences).sum(), table)
    assert_same(found, expected)
    summed = sequence_sum(logprobs - reference, bandit.MASK)
    (whole,) = torch.autograd.grad((sequence_sum(logprobs, bandit.MASK).exp() * summed).sum(), table)
    assert (found - whole).norm() > 1e-2 * whole.norm()


def test_the_documented_table_is_the_one_that_the_script_prints(capsys):
    bandit.main()
    assert capsys.readouterr().out in DOCUMENT.read_text(encoding="utf-8")
