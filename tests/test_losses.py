import math

import pytest
import torch

from async_rlhf.losses import (
    effective_sample_share,
    importance_stats,
    penalize_missing_eos,
    preference_loss,
    select_pairs,
    sequence_sum,
)


def test_preference_losses_by_hand():
    """h = 0.5 − (−1.5) = 2, β 0.1: −log σ(0.2) = log(1 + e^−0.2) = 0.598139; IPO (2 − 5)² = 9."""
    chosen, rejected = torch.tensor([0.5]), torch.tensor([-1.5])
    assert preference_loss(chosen, rejected, 0.1).item() == pytest.approx(0.598139, abs=1e-6)
    assert preference_loss(chosen, rejected, 0.1, "ipo").item() == pytest.approx(9.0, abs=1e-5)
    assert preference_loss(chosen, chosen, 0.1).item() == pytest.approx(math.log(2), abs=1e-6)


def test_pairs_are_best_against_worst_and_ties_are_told():
    scores = torch.tensor([[0.1, 0.9, 0.5, -1.0], [2.0, 2.0, 2.0, 2.0], [1.0, 3.0, 3.0, 1.0]])
    best, worst, tied = select_pairs(scores)
    assert best.tolist() == [1, 0, 1]
    assert worst.tolist() == [3, 0, 0]
    assert tied.tolist() == [False, True, False]


def test_sequence_sum_ignores_what_is_masked_even_nan():
    values = torch.tensor([[1.0, 2.0, float("nan")], [float("nan"), float("inf"), 0.0]])
    mask = torch.tensor([[True, True, False], [False, False, False]])
    assert sequence_sum(values, mask).tolist() == [3.0, 0.0]


def test_missing_eos_penalty_subtracts_and_replacement_replaces():
    scores, finished = torch.tensor([-3.0, -3.0]), torch.tensor([True, False])
    assert penalize_missing_eos(scores, finished, penalty=1.0).tolist() == [-3.0, -4.0]
    assert penalize_missing_eos(scores, finished, replacement=-1.0).tolist() == [-3.0, -1.0]
    assert penalize_missing_eos(scores, finished).tolist() == [-3.0, -3.0]


def test_importance_stats_by_hand():
    """log-ratios log 2 and log ½: ratios 2, ½; k3 = r − 1 − log r = 0.306853 and 0.193147; their sum over the sequence is 0."""
    current = torch.tensor([[math.log(0.4), math.log(0.1), 7.0]])
    behaviour = torch.tensor([[math.log(0.2), math.log(0.2), 0.0]])
    stats = importance_stats(current, behaviour, torch.tensor([[True, True, False]]))
    torch.testing.assert_close(stats["ratio"], torch.tensor([[2.0, 0.5, 1.0]]))
    torch.testing.assert_close(stats["approx_kl"], torch.tensor([[0.306853, 0.193147, 0.0]]), atol=1e-6, rtol=0)
    assert stats["sequence_log_ratio"].item() == pytest.approx(0.0, abs=1e-6)


def test_importance_stats_stay_finite_far_away():
    stats = importance_stats(torch.tensor([[200.0]]), torch.tensor([[0.0]]), torch.tensor([[True]]))
    assert torch.isfinite(stats["ratio"]).all()


def test_effective_sample_share_by_hand():
    """Weights 1, 1, 2: (4)² / (3 · 6) = 16/18. A shift of all logarithms changes nothing, however large."""
    weights = torch.tensor([1.0, 1.0, 2.0], dtype=torch.float64).log()
    assert effective_sample_share(weights).item() == pytest.approx(16 / 18)
    assert effective_sample_share(weights + 1000).item() == pytest.approx(16 / 18)
