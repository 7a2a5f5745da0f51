import dataclasses
import json
import math
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from async_rlhf.advantages import AdaptiveKL, RunningMoments, gae, leave_one_out, step_mask, token_rewards, whiten

NAN = float("nan")


def test_leave_one_out_by_hand():
    """1 − (2+6)/2 = −3; 2 − (1+6)/2 = −1.5; 6 − (1+2)/2 = 4.5."""
    assert leave_one_out(torch.tensor([[1.0, 2.0, 6.0]])).tolist() == [[-3.0, -1.5, 4.5]]


def test_equal_scores_have_exactly_no_advantage():
    """0.1 and 0.7 are no binary fractions: the mean of several differs from them in the last bit."""
    assert leave_one_out(torch.tensor([[0.1] * 3, [0.7] * 3])).eq(0).all()
    assert leave_one_out(torch.full((1, 7), 1e6 / 3)).eq(0).all()


def test_one_score_alone_is_refused():
    with pytest.raises(ValueError, match="at least 2"):
        leave_one_out(torch.tensor([[1.0]]))


def test_leave_one_out_is_that_of_trl(monkeypatch):
    """TRL computes it amid sampling and scoring: a trainer made of stubs takes it through there, with the KL in the reward."""
    rloo = pytest.importorskip("trl.trainer.rloo_trainer")
    scores = torch.tensor([1.0, 2.0, 6.0, 0.5, 0.5, 0.5])
    completions = [[5, 6, 2], [7], [5, 2], [6, 6, 6], [2], [7, 7]]
    ours, reference = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0)).unbind(0)
    calls = iter([(ours, None, None), (reference, None, None)])
    trainer = object.__new__(rloo.RLOOTrainer)
    trainer.accelerator = SimpleNamespace(device="cpu", process_index=0, reduce=lambda tensor, reduction: tensor)
    trainer.model = SimpleNamespace(training=True)
    trainer.args = SimpleNamespace(per_device_train_batch_size=6, gradient_checkpointing_kwargs=None, gradient_checkpointing=False)
    trainer._tokenizer = SimpleNamespace(pad_token_id=2)
    trainer.pad_to_multiple_of, trainer.mask_truncated_completions, trainer.ref_model = None, False, object()
    trainer.beta, trainer.num_generations, trainer.reward_clip_range, trainer.normalize_advantages = 0.3, 3, None, False
    trainer.reward_weights, trainer.reward_func_names = torch.ones(1), ["score"]
    trainer._generate = lambda prompts: ([[1]] * 6, completions, [""] * 6)
    trainer._get_per_token_logps_and_entropies = lambda *a, **k: next(calls)
    trainer._calculate_rewards = lambda *a: scores[:, None]
    trainer._metrics, trainer._logs = MagicMock(), MagicMock()
    trainer._pending_extra_logs, trainer._pending_metrics, trainer.log_multimodal = {}, {}, False
    monkeypatch.setattr(rloo, "gather", lambda tensor: tensor)
    monkeypatch.setattr(rloo, "gather_object", lambda values: list(values))
    monkeypatch.setattr(rloo, "disable_gradient_checkpointing", lambda *a, **k: nullcontext())
    theirs = trainer._generate_and_score_completions([{"prompt": ""}] * 6)["advantages"]

    mask = torch.tensor([[position < len(completion) for position in range(3)] for completion in completions])
    rewards = scores - 0.3 * torch.where(mask, ours - reference, 0.0).sum(-1)
    torch.testing.assert_close(leave_one_out(rewards.view(2, 3)).flatten(), theirs, atol=1e-5, rtol=0)


# -- rewards a token ------------------------------------------------------------------------------------------------------------

# Four responses of at most 4 tokens: [a, b, eos, pad], without eos to the very end, a single token, and an empty one.
LENGTHS = torch.tensor([3, 4, 1, 0])
MASK = torch.arange(4) < LENGTHS[:, None]


def test_the_score_comes_with_the_last_response_token():
    """−0.1 · KL everywhere, and the score on top at index length − 1. An empty response has nowhere to put it."""
    kl = torch.tensor([[1.0, 2.0, 3.0, NAN], [1.0, 1.0, 1.0, 1.0], [5.0, NAN, NAN, NAN], [NAN] * 4])
    rewards = token_rewards(torch.tensor([10.0, 20.0, 30.0, 40.0]), kl, MASK, 0.1)
    expected = [[-0.1, -0.2, 9.7, 0.0], [-0.1, -0.1, -0.1, 19.9], [29.5, 0.0, 0.0, 0.0], [0.0] * 4]
    torch.testing.assert_close(rewards, torch.tensor(expected))
    assert step_mask(MASK) is MASK


def test_the_score_may_come_one_step_later():
    """One column more: index `length`, where the value of the finished text is; also after a response that fills all 4."""
    rewards = token_rewards(torch.tensor([10.0, 20.0, 30.0, 40.0]), torch.ones(4, 4), MASK, 0.1, "next_token")
    expected = [[-0.1, -0.1, -0.1, 10.0, 0.0], [-0.1, -0.1, -0.1, -0.1, 20.0], [-0.1, 30.0, 0.0, 0.0, 0.0], [40.0, 0.0, 0.0, 0.0, 0.0]]
    torch.testing.assert_close(rewards, torch.tensor(expected))
    assert step_mask(MASK, "next_token").sum(-1).tolist() == [4, 5, 2, 1]
    assert torch.equal(step_mask(MASK, "next_token"), torch.arange(5) < LENGTHS[:, None] + 1)


# -- GAE ------------------------------------------------------------------------------------------------------------------------


def test_gae_by_hand():
    """γ 1, λ 0.95. δ₁ = 1 − 0.2 = 0.8; δ₀ = −0.1 + 0.2 − 0.5 = −0.4; A₁ = 0.8, A₀ = −0.4 + 0.95·0.8 = 0.36; returns A + V."""
    mask = torch.tensor([[True, True, False]])
    advantages, returns = gae(torch.tensor([[-0.1, 1.0, NAN]]), torch.tensor([[0.5, 0.2, NAN]]), mask)
    torch.testing.assert_close(advantages, torch.tensor([[0.36, 0.8, 0.0]]))
    torch.testing.assert_close(returns, torch.tensor([[0.86, 1.0, 0.0]]))


def _gae_of_one(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """The definition, term by term: A_t = Σ_l (γλ)^l δ_{t+l}."""
    values = [*values, 0.0]
    deltas = [reward + gamma * values[t + 1] - values[t] for t, reward in enumerate(rewards)]
    return [sum((gamma * lam) ** (s - t) * deltas[s] for s in range(t, len(deltas))) for t in range(len(deltas))]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (1.0, 1.0), (0.9, 0.5), (1.0, 0.0)])
def test_gae_is_the_sum_of_its_definition(gamma, lam):
    """Every response alone, in plain floats: of different lengths, one token, none, and with a hole in the middle."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.arange(6) < torch.tensor([6, 4, 1, 0, 6])[:, None]
    mask[4, 2:4] = False
    rewards, values = torch.randn(2, 5, 6, generator=generator, dtype=torch.float64)
    garbage = torch.where(mask, 0.0, NAN)
    advantages, returns = gae(rewards + garbage, values + garbage, mask, gamma, lam)
    for row in range(5):
        kept = mask[row]
        expected = _gae_of_one(rewards[row][kept].tolist(), values[row][kept].tolist(), gamma, lam)
        assert advantages[row][kept].tolist() == pytest.approx(expected, abs=1e-9)
        assert returns[row][kept].tolist() == pytest.approx([a + v for a, v in zip(expected, values[row][kept].tolist(), strict=True)])
    assert not advantages[~mask].any()
    assert not returns[~mask].any()


def test_no_mask_parts_a_token_from_the_score():
    """With γ = λ = 1 and values 0 every token's advantage is the score, whatever padding follows or is left out in between."""
    mask = torch.tensor([[True, True, False, False], [True, False, True, False], [True, True, True, True]])
    rewards = token_rewards(torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3, 4), mask, 0.1)
    advantages, _ = gae(rewards, torch.zeros(3, 4), mask, 1.0, 1.0)
    torch.testing.assert_close(advantages, torch.where(mask, torch.tensor([[1.0], [2.0], [3.0]]), 0.0))


def test_where_the_two_conventions_differ():
    """Score 2, values 0.5, 0.7 and, after the last token, 1.2; no KL.

    λ 0.9, last token: A₁ = 2 − 0.7 = 1.3; A₀ = (0.7 − 0.5) + 0.9·1.3 = 1.37.
    λ 0.9, one later: A₂ = 2 − 1.2 = 0.8; A₁ = (1.2 − 0.7) + 0.9·0.8 = 1.22; A₀ = 0.2 + 0.9·1.22 = 1.298.
    At λ 1 the sum telescopes: both give 1.3 and 1.5."""
    scores, kl, mask = torch.tensor([2.0]), torch.zeros(1, 2), torch.tensor([[True, True]])
    values = torch.tensor([[0.5, 0.7, 1.2]])

    def advantages(lam: float, score_at: str) -> list[float]:
        steps = step_mask(mask, score_at)
        rewards = token_rewards(scores, kl, mask, 0.1, score_at)
        return gae(rewards, values[:, : steps.shape[-1]], steps, 1.0, lam)[0][0].tolist()

    assert advantages(0.9, "last_token") == pytest.approx([1.37, 1.3])
    assert advantages(0.9, "next_token") == pytest.approx([1.298, 1.22, 0.8])
    assert advantages(1.0, "last_token") == pytest.approx([1.5, 1.3])
    assert advantages(1.0, "next_token")[:2] == pytest.approx([1.5, 1.3])


# -- whitening ------------------------------------------------------------------------------------------------------------------


def test_whiten_by_hand():
    """1 and 3: mean 2, variance 1. What is masked is not seen."""
    values, mask = torch.tensor([[1.0, NAN], [3.0, 99.0]]), torch.tensor([[True, False], [True, False]])
    torch.testing.assert_close(whiten(values, mask), torch.tensor([[-1.0, 0.0], [1.0, 0.0]]))
    torch.testing.assert_close(whiten(values, mask, keep_mean=True), torch.tensor([[1.0, 0.0], [3.0, 0.0]]))


def test_whitening_one_token_or_none_neither_crashes_nor_explodes():
    one = torch.tensor([True, False])
    assert whiten(torch.tensor([3.7, NAN]), one).tolist() == [0.0, 0.0]
    assert whiten(torch.tensor([3.5, NAN]), one, keep_mean=True).tolist() == [3.5, 0.0]
    assert whiten(torch.tensor([0.1, 0.1, 0.1]), torch.tensor([True] * 3)).tolist() == [0.0] * 3
    assert whiten(torch.tensor([NAN, NAN]), torch.tensor([False, False])).tolist() == [0.0, 0.0]


def test_whitening_is_over_all_ranks():
    """This rank has 1 and 3, the other 5: count 3, sum 9, mean 3; squares (4 + 0) + 4 = 8, variance 8/3."""
    others = iter([1.0, 5.0, 4.0])
    whitened = whiten(torch.tensor([1.0, 3.0]), torch.tensor([True, True]), lambda mine: float(mine) + next(others))
    torch.testing.assert_close(whitened, torch.tensor([-2 / math.sqrt(8 / 3), 0.0]))


# -- what a run carries along ---------------------------------------------------------------------------------------------------


def test_adaptive_kl_by_hand():
    """Target 6. KL 9: error 0.5, clipped to 0.2: 0.2·(1 + 0.2·256/10000) = 0.201024. KL 5.4: error −0.1: 0.2·(1 − 0.00256)."""
    controller = AdaptiveKL(0.2, 6.0)
    assert controller.update(9.0, 256).coef == pytest.approx(0.201024)
    assert controller.update(5.4, 256).coef == pytest.approx(0.199488)
    assert controller.coef == 0.2
    assert AdaptiveKL(0.2, 6.0, horizon=10).update(0.0, 10**6).coef == pytest.approx(0.16), "no batch turns the sign"


def test_states_survive_json():
    for state in (AdaptiveKL(0.2, 6.0).update(9.0, 256), RunningMoments.of(torch.tensor([1.0, 2.0]))):
        assert type(state)(**json.loads(json.dumps(dataclasses.asdict(state)))) == state


def test_running_moments_are_those_of_all_values():
    values = torch.randn(50, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 3 + 1000
    moments = RunningMoments()
    for part in values.split([1, 20, 0, 29]):
        moments = moments.merge(RunningMoments.of(part))
    assert (moments.count, moments.mean) == (50, pytest.approx(values.mean().item()))
    assert moments.std == pytest.approx(values.std(correction=0).item(), rel=1e-9)


def test_scores_are_normalized_by_hand():
    """1 and 3: mean 2, deviation 1; 5 becomes 3. While nothing has varied they are only centred."""
    assert RunningMoments.of(torch.tensor([1.0, 3.0])).normalize(torch.tensor([5.0])).tolist() == [3.0]
    assert RunningMoments.of(torch.tensor([2.0])).normalize(torch.tensor([2.0, 5.0])).tolist() == [0.0, 3.0]
    assert RunningMoments().std == 0.0
