"""The toy of benchmarks/off_policy_pairs.py against a second enumeration, written here with plain numbers and gradients by hand."""

import math
from itertools import product
from pathlib import Path

import pytest
import torch
from tiny_run import settings

from async_rlhf.algorithm import ScoredBatch
from async_rlhf.metrics import Metrics
from benchmarks import off_policy_pairs as toy
from online_dpo import OnlineDPO

DOCUMENT = Path(__file__).parent.parent / "docs" / "off_policy.md"
ALL = [(k, correction) for k, corrections in toy.CORRECTIONS.items() for correction in corrections]
EXACT = [(2, "sequence"), (3, "group"), (2, "group")]


def steps(logits, response):
    """(context, token) of every token of a response."""
    return [(0, response[0])] + [(response[0], token) for token in response[1:]]


def log_softmax(row):
    return [logit - math.log(sum(map(math.exp, row))) for logit in row]


def enumerate_by_hand(policy, stale, reference, k, name, cap):
    """Mean over groups drawn from `stale` of the weighted gradient, a list of 9, and its variance."""
    tables = [[log_softmax(row) for row in logits.tolist()] for logits in (policy, stale, reference)]
    logp, logm, logr = ([[table[c][t] for c, t in steps(table, y)] for y in toy.RESPONSES] for table in tables)
    scores = []  # ∇ log π(y): one-hot minus softmax, at every context that the response visits
    for y in toy.RESPONSES:
        score = [0.0] * 9
        for context, token in steps(policy, y):
            for other in range(3):
                score[3 * context + other] += (other == token) - math.exp(tables[0][context][other])
        scores.append(score)
    mean, square = [0.0] * 9, 0.0
    for group in product(range(7), repeat=k):
        probability = math.exp(sum(sum(logm[y]) for y in group))
        best, worst = max(group, key=lambda y: toy.REWARDS[y]), min(group, key=lambda y: toy.REWARDS[y])
        if best == worst:
            continue
        ratios = {y: [p - m for p, m in zip(logp[y], logm[y], strict=True)] for y in group}
        exact = math.exp(sum(ratios[best]) + sum(ratios[worst]))
        weight = {
            "none": 1.0,
            "sequence": exact,
            "group": math.exp(sum(sum(ratios[y]) for y in group)),
            "token_mean": math.exp(sum(ratios[best]) / len(ratios[best]) + sum(ratios[worst]) / len(ratios[worst])),
            "mask": float(cap is not None and 1 / cap <= exact <= cap),
        }[name]
        weight = weight if cap is None else min(weight, cap)
        h = sum(logp[best]) - sum(logr[best]) - sum(logp[worst]) + sum(logr[worst])
        slope = -toy.BETA / (1 + math.exp(toy.BETA * h))
        gradient = [weight * slope * (up - down) for up, down in zip(scores[best], scores[worst], strict=True)]
        mean = [m + probability * g for m, g in zip(mean, gradient, strict=True)]
        square += probability * sum(g * g for g in gradient)
    return torch.tensor(mean, dtype=torch.float64), square - sum(m * m for m in mean)


def enumerated(k, behind, correction):
    trained = toy.policies()
    policy, stale, reference = trained[-1], trained[-1 - behind], trained[0]
    gradients = toy.group_gradients(policy, stale, reference, k, correction)
    return policy, stale, reference, toy.moments(toy.probabilities(stale, k), gradients)


@pytest.mark.parametrize("behind", toy.STALENESS)
@pytest.mark.parametrize("k, name", EXACT)
def test_untruncated_weights_of_all_samples_give_the_on_policy_gradient_exactly(k, name, behind):
    policy, _, reference, (mean, _) = enumerated(k, behind, toy.Correction(name))
    target, _ = enumerate_by_hand(policy, policy, reference, k, "none", None)
    assert (mean - target).abs().max() < 1e-10 * target.abs().max()


@pytest.mark.parametrize("k, correction", ALL, ids=str)
def test_every_correction_has_exactly_the_bias_and_variance_of_the_enumeration_by_hand(k, correction):
    policy, stale, reference, (mean, variance) = enumerated(k, toy.STALENESS[-1], correction)
    expected, expected_variance = enumerate_by_hand(policy, stale, reference, k, correction.name, correction.cap)
    torch.testing.assert_close(mean, expected, atol=1e-12, rtol=1e-10)
    assert variance == pytest.approx(expected_variance, rel=1e-10)


@pytest.mark.parametrize("k, correction", ALL, ids=str)
def test_only_the_exact_weights_are_unbiased(k, correction):
    bias = toy.study(k, toy.STALENESS[-1])[str(correction)]["bias"]
    assert bias < 1e-10 if (k, correction.name) in EXACT and correction.cap is None else bias > 0.05


class Table(torch.nn.Module):
    """A policy that is a table of logits, called as the trainer calls one."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.nn.Parameter(logits.clone())

    def forward(self, prompt_ids, prompt_length, response_ids, response_length, temperature):
        logprobs = (self.logits / temperature).log_softmax(-1)
        first, second = response_ids[..., 0], response_ids[..., 1]
        return torch.stack([logprobs[0, first], logprobs[first, second]], -1)


@pytest.mark.parametrize("k, correction", [*ALL, (2, toy.Correction("group"))], ids=str)
def test_the_scripts_loss_has_the_enumerations_gradient(k, correction):
    """Every group as a row, weighted by its probability under the stale policy: `make_batch` and `loss` in one."""
    policy, stale, reference, (mean, _) = enumerated(k, toy.STALENESS[-1], correction)
    samples, mask = toy.groups(k), toy.response_mask()
    ids = torch.tensor([[y[0], y[-1]] for y in toy.RESPONSES])
    prompts = {"prompt_ids": torch.zeros(len(samples), 1), "prompt_length": torch.ones(len(samples))}
    tokens = {**prompts, "response_ids": ids[samples], "response_length": mask.sum(-1)[samples]}
    scores = torch.tensor(toy.REWARDS)[samples]
    behaviour, ref = (toy.log_probabilities(logits)[samples] for logits in (stale, reference))
    config = settings("model", "prompts", "reward", "out", num_generations=k, per_device_train_batch_size=k, beta=toy.BETA,
                      temperature=1.0, off_policy_correction=correction.name, pair_weight_cap=correction.cap)  # fmt: skip
    algorithm, metrics, table = OnlineDPO(config), Metrics(), Table(policy)
    batch = algorithm.make_batch(ScoredBatch(0, [], tokens, mask[samples], scores, behaviour, ref, torch.zeros(len(scores)), None), metrics)
    batch["weight"] = batch["weight"].double() * toy.probabilities(stale, k)
    algorithm.loss(table, batch, metrics).backward()
    torch.testing.assert_close(table.logits.grad.flatten(), mean, atol=1e-12, rtol=1e-10)


def test_effective_share_over_length_is_the_enumerated_one():
    """Pairs of sequences of two independent tokens, π (0.6, 0.4) and μ (0.5, 0.5): χ² = 2·(0.36 + 0.16) − 1 = 0.04."""
    squares = sum(0.5**4 * math.prod((0.6, 0.4)[t] / 0.5 for t in tokens) ** 2 for tokens in product((0, 1), repeat=4))
    assert toy.length_share(0.04, 2) == pytest.approx(1 / squares)


def test_mean_of_capped_log_normal_weights_is_the_integral():
    """σ² = −log 0.2; log w ~ N(−σ²/2, σ²)."""
    variance = -math.log(0.2)
    log_w = torch.linspace(-20, 20, 200_001, dtype=torch.float64)
    density = torch.distributions.Normal(-variance / 2, variance**0.5).log_prob(log_w).exp()
    assert toy.kept_mean(0.2, 2.0) == pytest.approx(float(torch.trapezoid(density * log_w.exp().clamp(max=2), log_w)), abs=1e-6)
    assert toy.kept_mean(0.2, 1e9) == pytest.approx(1)


def test_the_documents_tables_are_what_the_script_computes():
    text = DOCUMENT.read_text(encoding="utf-8")
    for table in toy.bias_table().split("\n\n"):
        assert table in text
    assert toy.length_table() in text and toy.cap_table() in text
    for behind in toy.STALENESS:
        apart = toy.divergence(behind)
        assert f"| {behind} | {apart['kl']:.3f} | {apart['ess']:.2f} |" in text
