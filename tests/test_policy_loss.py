import math
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from async_rlhf.losses import copg_loss, interpolate_proximal, kl_estimate, policy_loss, supervised_loss, value_loss

NAN, INF = float("nan"), float("inf")
SURROGATES = ["reinforce", "clip", "cispo"]
CORRECTIONS = ["none", "truncate_token", "truncate_sequence", "mask_token", "mask_sequence"]


def logs(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


# Two sequences of two tokens and a padding that means nothing. Ratios π/μ: 1.5 and 0.5 (their product 0.75), 3 and 1 (3).
CURRENT = logs([[0.6, 0.2, NAN], [0.3, 0.5, NAN]])
BEHAVIOUR = logs([[0.4, 0.4, NAN], [0.1, 0.5, NAN]])
MASK = torch.tensor([[True, True, False], [True, True, False]])
ADVANTAGES = torch.tensor([2.0, -1.0], dtype=torch.float64)


def loss_and_gradient(current=CURRENT, behaviour=BEHAVIOUR, advantages=ADVANTAGES, mask=MASK, **settings):
    """Loss a unit, its summed gradient for log π as multipliers of A·∇log π, and the two flags."""
    current = current.clone().requires_grad_()
    result = policy_loss(current, behaviour, advantages, mask, **settings)
    (gradient,) = torch.autograd.grad(result.loss.sum(), current)
    multipliers = -gradient[..., : CURRENT.shape[-1] - 1] / advantages[..., None]
    return result.loss.detach(), multipliers.tolist(), result.clipped.tolist(), result.corrected.tolist()


# -- surrogates -------------------------------------------------------------------------------------------------------------------


def test_reinforce_by_hand():
    """−A·log π: −2·log 0.6, −2·log 0.2; +log 0.3, +log 0.5. No ratio: every multiplier is 1. Of sequences: the sums."""
    loss, multipliers, *_ = loss_and_gradient(surrogate="reinforce")
    expected = [[-2 * math.log(0.6), -2 * math.log(0.2), 0.0], [math.log(0.3), math.log(0.5), 0.0]]
    torch.testing.assert_close(loss, torch.tensor(expected, dtype=torch.float64))
    assert multipliers == [[1.0, 1.0], [1.0, 1.0]]
    loss, multipliers, *_ = loss_and_gradient(surrogate="reinforce", ratio_level="sequence")
    torch.testing.assert_close(loss, torch.tensor([-2 * math.log(0.12), math.log(0.15)], dtype=torch.float64))
    assert multipliers == [[1.0, 1.0], [1.0, 1.0]]


def test_ppo_by_hand():
    """A 2: ratio 1.5 is clipped to 1.2, −2.4, no gradient; ratio 0.5 is not, −1. A −1: ratio 3 stays, +3; ratio 1, +1."""
    loss, multipliers, clipped, _ = loss_and_gradient()
    torch.testing.assert_close(loss, torch.tensor([[-2.4, -1.0, 0.0], [3.0, 1.0, 0.0]], dtype=torch.float64))
    torch.testing.assert_close(torch.tensor(multipliers), torch.tensor([[0.0, 0.5], [3.0, 1.0]]))
    assert clipped == [[True, False, False], [False, False, False]]


def test_proximal_rloo_by_hand():
    """Of sequences: ratio 0.75 with A 2 stays, −1.5; ratio 3 with A −1 stays, +3. With A the other way round: 0.8 and 1.2, cut."""
    loss, multipliers, clipped, _ = loss_and_gradient(ratio_level="sequence")
    torch.testing.assert_close(loss, torch.tensor([-1.5, 3.0], dtype=torch.float64))
    torch.testing.assert_close(torch.tensor(multipliers), torch.tensor([[0.75, 0.75], [3.0, 3.0]]))
    assert clipped == [False, False]
    loss, multipliers, clipped, _ = loss_and_gradient(advantages=-ADVANTAGES, ratio_level="sequence")
    torch.testing.assert_close(loss, torch.tensor([1.6, -1.2], dtype=torch.float64))
    assert multipliers == [[0.0, 0.0], [0.0, 0.0]]
    assert clipped == [True, True]


def test_cispo_by_hand_drops_no_gradient():
    """Weights: 1.5 capped at 1.2, 0.5 raised to 0.8, 3 capped, 1. It is REINFORCE with truncated token weights."""
    _, multipliers, clipped, _ = loss_and_gradient(surrogate="cispo")
    torch.testing.assert_close(torch.tensor(multipliers), torch.tensor([[1.2, 0.8], [1.2, 1.0]]))
    assert clipped == [[True, True, False], [True, False, False]]
    cispo = loss_and_gradient(surrogate="cispo", clip_range=(0.5, 0.2))
    truncated = loss_and_gradient(surrogate="reinforce", correction="truncate_token", correction_range=(0.5, 1.2))
    torch.testing.assert_close(cispo[:2], truncated[:2])


def test_an_asymmetric_clip_has_its_own_ends():
    """A > 0 looks at the upper end: 1.5 passes 0.6. A < 0 looks at the lower one: 0.75 is below 0.9."""
    _, multipliers, *_ = loss_and_gradient(clip_range=(0.1, 0.6))
    torch.testing.assert_close(torch.tensor(multipliers), torch.tensor([[1.5, 0.5], [3.0, 1.0]]))
    _, _, clipped, _ = loss_and_gradient(advantages=-ADVANTAGES, ratio_level="sequence", clip_range=(0.1, 2.5))
    assert clipped == [True, False]


def _ppo_in_floats(current, behaviour, advantages, lengths, low, high):
    """PPO's loss and its derivative by log π, in plain floats, a token at a time."""
    losses, gradients = [], []
    for row, length in enumerate(lengths):
        for t in range(length):
            advantage = advantages[row][t]
            ratio = math.exp(current[row][t] - behaviour[row][t])
            limited = min(max(ratio, 1 - low), 1 + high)
            losses.append(max(-ratio * advantage, -limited * advantage))
            gradients.append(-ratio * advantage if -ratio * advantage >= -limited * advantage else 0.0)
    return losses, gradients


def test_ppo_is_that_of_plain_floats_on_ragged_responses():
    """Lengths 5 (no eos), 3 ([a, b, eos] and padding), 1 and 0; the padding holds garbage."""
    generator = torch.Generator().manual_seed(3)
    lengths = [5, 3, 1, 0]
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    current, noise, advantages = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    behaviour = current + 0.5 * noise
    losses, gradients = _ppo_in_floats(current.tolist(), behaviour.tolist(), advantages.tolist(), lengths, 0.2, 0.3)
    garbage = torch.where(mask, 0.0, NAN)
    leaf = (current + garbage).requires_grad_()
    result = policy_loss(leaf, behaviour + garbage, advantages + garbage, mask, clip_range=(0.2, 0.3))
    (gradient,) = torch.autograd.grad(result.loss.sum(), leaf)
    assert result.loss[mask].tolist() == pytest.approx(losses, abs=1e-9)
    assert gradient[mask].tolist() == pytest.approx(gradients, abs=1e-9)
    assert not result.loss[~mask].any()
    assert not gradient[~mask].any()
    assert 0 < result.clipped.sum() < mask.sum()
    assert not result.clipped[~mask].any()


def test_proximal_rloo_is_the_loss_of_trl():
    """TRL's is a method: a trainer made of stubs lends its settings. Its mean over sequences, and the gradient for every token."""
    rloo = pytest.importorskip("trl.trainer.rloo_trainer")
    generator = torch.Generator().manual_seed(4)
    mask = torch.arange(4) < torch.tensor([4, 3, 1, 2, 4, 3])[:, None]
    logprobs, noise = torch.randn(2, 6, 4, generator=generator)
    behaviour, advantages = logprobs + 0.2 * noise, torch.randn(6, generator=generator)
    theirs, ours = logprobs.clone().requires_grad_(), logprobs.clone().requires_grad_()
    same = SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x, gather_for_metrics=lambda x: x)
    trainer = object.__new__(rloo.RLOOTrainer)
    trainer.accelerator, trainer.aux_loss_enabled, trainer._metrics = same, False, MagicMock()
    trainer.model = SimpleNamespace(training=True)
    trainer.epsilon_low, trainer.epsilon_high = 0.2, 0.25
    trainer._get_per_token_logps_and_entropies = lambda *a, **k: (theirs, torch.zeros(6, 4), None)
    ids = torch.zeros(6, 4, dtype=torch.long)
    inputs = {"prompt_ids": ids, "prompt_mask": mask, "completion_ids": ids, "completion_mask": mask.long()}
    inputs |= {"old_logps": torch.where(mask, behaviour, 0.0).sum(1), "advantages": advantages}
    expected = trainer._compute_loss(trainer.model, inputs)
    result = policy_loss(ours, behaviour, advantages, mask, ratio_level="sequence", clip_range=(0.2, 0.25))
    torch.testing.assert_close(result.loss.mean(), expected, atol=1e-5, rtol=0)
    expected.backward()
    result.loss.mean().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=0)
    assert 0 < result.clipped.sum() < 6


# -- corrections ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("correction", "limits", "multipliers", "corrected"),
    [
        # token ratios 1.5, 0.5 | 3, 1; of the sequences 0.75 | 3
        ("truncate_token", (0.0, 2.0), [[1.5, 0.5], [2.0, 1.0]], [[False, False, False], [True, False, False]]),
        ("truncate_token", (0.8, INF), [[1.5, 0.8], [3.0, 1.0]], [[False, True, False], [False, False, False]]),
        ("truncate_sequence", (0.0, 2.0), [[0.75, 0.75], [2.0, 2.0]], [[False, False, False], [True, True, False]]),
        ("mask_token", (0.8, 2.0), [[1.5, 0.0], [0.0, 1.0]], [[False, True, False], [True, False, False]]),
        ("mask_sequence", (0.5, 2.0), [[0.75, 0.75], [0.0, 0.0]], [[False, False, False], [True, True, False]]),
    ],
)
def test_weights_of_reinforce_by_hand(correction, limits, multipliers, corrected):
    _, found, clipped, changed = loss_and_gradient(surrogate="reinforce", correction=correction, correction_range=limits)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(multipliers))
    assert changed == corrected
    assert not torch.tensor(clipped).any()


@pytest.mark.parametrize("surrogate", ["clip", "cispo"])
def test_masks_without_a_proximal_policy_only_drop(surrogate):
    """The ratio is in the surrogate already: inside the band the multiplier is the surrogate's own."""
    _, plain, *_ = loss_and_gradient(surrogate=surrogate)
    _, tokens, _, dropped = loss_and_gradient(surrogate=surrogate, correction="mask_token", correction_range=(0.8, 2.0))
    torch.testing.assert_close(torch.tensor(tokens), torch.tensor(plain) * torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    assert dropped == [[False, True, False], [True, False, False]]
    _, sequences, *_ = loss_and_gradient(surrogate=surrogate, correction="mask_sequence", correction_range=(0.8, 4.0))
    torch.testing.assert_close(torch.tensor(sequences), torch.tensor(plain) * torch.tensor([[0.0], [1.0]]))


PROXIMAL = logs([[0.5, 0.3, NAN], [0.2, 0.5, NAN]])


def test_decoupled_ppo_by_hand():
    """r = π/prox = 1.2, 0.667 | 1.5, 1; w = prox/μ = 1.25, 0.75 | 2, 1; clip 0.25. A 2: 1.2 is below 1.25, a low ratio stays:
    −w·r·A = −1.25·1.2·2 = −3 and −0.75·0.667·2 = −1. A −1: a high ratio stays: 2·1.5 = 3, and 1. (π/μ would be clipped at 1.5.)"""
    loss, multipliers, *_ = loss_and_gradient(
        proximal=PROXIMAL, clip_range=(0.25, 0.25), correction="truncate_token", correction_range=(0.0, INF)
    )
    torch.testing.assert_close(loss, torch.tensor([[-3.0, -1.0, 0.0], [3.0, 1.0, 0.0]], dtype=torch.float64))
    torch.testing.assert_close(torch.tensor(multipliers), torch.tensor([[1.5, 0.5], [3.0, 1.0]]))
    # Truncated at 1.1 (TIS): 1.1·1.2, 0.75·0.667 | 1.1·1.5, 1. By sequences: w = 0.9375 | 2.
    settings = {"proximal": PROXIMAL, "clip_range": (0.25, 0.25), "correction_range": (0.0, 1.1)}
    _, multipliers, _, corrected = loss_and_gradient(correction="truncate_token", **settings)
    torch.testing.assert_close(torch.tensor(multipliers), torch.tensor([[1.32, 0.5], [1.65, 1.0]]))
    assert corrected == [[True, False, False], [True, False, False]]
    _, multipliers, *_ = loss_and_gradient(correction="truncate_sequence", **settings)
    torch.testing.assert_close(torch.tensor(multipliers), torch.tensor([[0.9375 * 1.2, 0.625], [1.65, 1.1]]))
    _, multipliers, *_ = loss_and_gradient(correction="mask_token", **settings)
    torch.testing.assert_close(torch.tensor(multipliers), torch.tensor([[0.0, 0.5], [0.0, 1.0]]))


def test_decoupled_ppo_around_the_sampler_is_ppo():
    for correction in CORRECTIONS:
        decoupled = loss_and_gradient(proximal=BEHAVIOUR, correction=correction, correction_range=(0.5, 2.0))
        torch.testing.assert_close(decoupled[:2], loss_and_gradient()[:2])


def test_a_recomputed_policy_without_a_weight_replaces_the_sampler():
    torch.testing.assert_close(loss_and_gradient(proximal=PROXIMAL)[:2], loss_and_gradient(behaviour=PROXIMAL)[:2])


def test_interpolated_proximal_by_hand():
    """Half-way in logarithms: √(0.6·0.4) and √(0.2·0.4). Where nothing is clipped r·w = π/μ, whatever the share."""
    torch.testing.assert_close(interpolate_proximal(CURRENT, BEHAVIOUR, 0.5)[0, :2].exp().square(), torch.tensor([0.24, 0.08]).double())
    torch.testing.assert_close(interpolate_proximal(CURRENT, BEHAVIOUR, 0.0)[MASK], BEHAVIOUR[MASK])
    assert not interpolate_proximal(CURRENT.clone().requires_grad_(), BEHAVIOUR, 0.5).requires_grad
    share = torch.tensor([[0.3], [1.0]], dtype=torch.float64)
    _, multipliers, *_ = loss_and_gradient(
        proximal=interpolate_proximal(CURRENT, BEHAVIOUR, share),
        clip_range=(INF, INF),
        correction="truncate_token",
        correction_range=(0.0, INF),
    )
    torch.testing.assert_close(torch.tensor(multipliers), torch.tensor([[1.5, 0.5], [3.0, 1.0]]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"correction": "truncate_token"}, "needs a proximal policy"),
        ({"correction": "truncate_sequence", "surrogate": "cispo"}, "needs a proximal policy"),
        ({"correction": "mask_token", "ratio_level": "sequence"}, "one loss a sequence"),
        ({"correction": "clip_token"}, "'truncate' or 'mask'"),
        ({"surrogate": "ppo"}, "'reinforce', 'clip' or 'cispo'"),
    ],
)
def test_what_has_no_meaning_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        loss_and_gradient(**settings)


def test_a_sequence_ratio_wants_an_advantage_a_sequence():
    with pytest.raises(ValueError, match="one advantage a sequence"):
        policy_loss(CURRENT, BEHAVIOUR, torch.ones(2, 3), MASK, ratio_level="sequence")


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("ratio_level", ["token", "sequence"])
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("proximal", [None, "half-way"])
@pytest.mark.parametrize("far", [200.0, -200.0])
def test_everything_stays_finite_far_away_and_over_garbage(surrogate, ratio_level, correction, proximal, far):
    """A log-ratio of ±200, padding of NaN and infinity, and an empty response: finite losses and gradients, none from the padding."""
    mask = torch.tensor([[True, True, False], [False, False, False]])
    current = torch.tensor([[-1.0, -2.0, NAN], [INF, NAN, -INF]], requires_grad=True)
    behaviour = torch.tensor([[-1.0 - far, -2.0, INF], [NAN, -INF, 0.0]])
    middle = (current.detach() + behaviour) / 2 if proximal else None
    for sign in (1.0, -1.0):
        try:
            loss = policy_loss(
                current,
                behaviour,
                torch.tensor([sign, sign]),
                mask,
                proximal=middle,
                surrogate=surrogate,
                ratio_level=ratio_level,
                correction=correction,
                correction_range=(0.0, INF),
            ).loss
        except ValueError:
            return  # refused: see above
        (gradient,) = torch.autograd.grad(loss.sum(), current)
        assert torch.isfinite(loss).all()
        assert torch.isfinite(gradient).all()
        assert not gradient[~mask].any()


# -- KL estimates -----------------------------------------------------------------------------------------------------------------


def _kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p.exp() * (p - q)).sum()


def test_kl_estimates_are_biased_for_what_they_say():
    """One token of three, summed over all with their probability: no sampling noise in value or gradient."""
    logits = torch.tensor([0.3, -0.8, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.2, 0.4, 0.3], dtype=torch.float64).log_softmax(-1)
    mask = torch.tensor([True] * 3)

    def value_and_gradient(kind: str):
        logprobs = logits.log_softmax(-1)
        estimate = kl_estimate(logprobs, reference, mask, kind)
        probability = logprobs.exp().detach()  # the samples are given: as a loss term only the estimate has a gradient
        mean = (probability * estimate).sum()
        return mean.detach(), torch.autograd.grad(mean, logits)[0]

    forward, reverse = _kl(logits.log_softmax(-1), reference), _kl(reference, logits.log_softmax(-1))
    forward_gradient, reverse_gradient = (torch.autograd.grad(kl, logits)[0] for kl in (forward, reverse))
    (k1, k1_gradient), (k2, k2_gradient), (k3, k3_gradient) = (value_and_gradient(kind) for kind in ("k1", "k2", "k3"))
    torch.testing.assert_close(k1, forward.detach())
    torch.testing.assert_close(k3, forward.detach())
    assert abs(k2 - forward) > 1e-3
    torch.testing.assert_close(k1_gradient, torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(k2_gradient, forward_gradient)
    torch.testing.assert_close(k3_gradient, reverse_gradient)
    assert (forward_gradient - reverse_gradient).abs().max() > 1e-2

    # In the reward, without a gradient of its own, k1 gives the gradient of KL(π‖π_ref).
    logprobs = logits.log_softmax(-1)
    reward = kl_estimate(logprobs, reference, mask, "k1").detach()
    (in_reward,) = torch.autograd.grad((logprobs.exp().detach() * reward * logprobs).sum(), logits)
    torch.testing.assert_close(in_reward, forward_gradient)


def test_kl_estimates_by_hand():
    """ℓ = log 2: k1 0.693147, k2 0.240227, k3 ½ − 1 + 0.693147 = 0.193147. The padding is 0."""
    current, reference, mask = logs([[0.4, NAN]]), logs([[0.2, 0.3]]), torch.tensor([[True, False]])
    for kind, expected in (("k1", 0.693147), ("k2", 0.240227), ("k3", 0.193147)):
        assert kl_estimate(current, reference, mask, kind).tolist() == [[pytest.approx(expected, abs=1e-6), 0.0]]
    with pytest.raises(ValueError, match="'k1', 'k2' or 'k3'"):
        kl_estimate(current, reference, mask, "k4")


@pytest.mark.parametrize("far", [200.0, -200.0])
def test_kl_estimates_stay_finite(far):
    for kind in ("k1", "k2", "k3"):
        current = torch.tensor([[far, NAN]], requires_grad=True)
        estimate = kl_estimate(current, torch.zeros(1, 2), torch.tensor([[True, False]]), kind)
        (gradient,) = torch.autograd.grad(estimate.sum(), current)
        assert torch.isfinite(estimate).all()
        assert torch.isfinite(gradient).all()


# -- the other losses ---------------------------------------------------------------------------------------------------------------


def test_copg_by_hand():
    """β 0.5, scores 1 and 3, log-ratios 0.4 and −0.2. The pair: (1 − 3 − 0.25·0.6)·0.6 = −1.29, its loss +1.29, over k − 1 = 1.
    A sequence: LOO of the scores ∓2, of the log-ratios ±0.6: −0.4·(−2 − 0.15) = 0.86; 0.2·(2 + 0.15) = 0.43; sum 1.29."""
    loss = copg_loss(torch.tensor([[1.0, 3.0]]), torch.tensor([[0.4, -0.2]]), 0.5)
    torch.testing.assert_close(loss, torch.tensor([[0.86, 0.43]]))


def test_copg_is_the_squared_error_of_all_pairs():
    """For k = 3: Σ over pairs of (ΔR − β·Δρ)² / (2β) less (ΔR)² / (2β), over k − 1: value and gradient."""
    scores, beta = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64), 0.3
    rho = torch.tensor([0.2, 0.7, -0.4], dtype=torch.float64, requires_grad=True)
    pairs = [(0, 1), (0, 2), (1, 2)]
    squares = [(scores[i] - scores[j] - beta * (rho[i] - rho[j])).square() - (scores[i] - scores[j]).square() for i, j in pairs]
    expected = sum(squares) / (2 * beta) / 2
    loss = copg_loss(scores, rho, beta).sum()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, rho), torch.autograd.grad(expected, rho))


def test_equal_scores_teach_copg_only_the_reference():
    """No reward to compare, log-ratios 0.4 and −0.2: the loss is β/2·(Δρ)² over k − 1."""
    loss = copg_loss(torch.tensor([[0.1, 0.1]]), torch.tensor([[0.4, -0.2]]), 0.5)
    assert loss.sum().item() == pytest.approx(0.25 * 0.36)


def test_value_loss_by_hand():
    """Clip 0.2. V 1 → G 2: ½. V moved from 0 to 1 is held at 0.2: ½·1.8² = 1.62, the larger. V 0.1 from 0 is not held: ½·1.9².
    V 3 from 0, G −1: ½·16 = 8 against ½·1.2² = 0.72."""
    values = torch.tensor([[1.0, 1.0, 0.1, 3.0, NAN]])
    old = torch.tensor([[1.0, 0.0, 0.0, 0.0, NAN]])
    returns, mask = torch.tensor([[2.0, 2.0, 2.0, -1.0, NAN]]), torch.tensor([[True, True, True, True, False]])
    loss, clipped = value_loss(values, old, returns, mask)
    torch.testing.assert_close(loss, torch.tensor([[0.5, 1.62, 1.805, 8.0, 0.0]]))
    assert clipped.tolist() == [[False, True, False, False, False]]
    loss, clipped = value_loss(values, old, returns, mask, clip=None)
    torch.testing.assert_close(loss, torch.tensor([[0.5, 0.5, 1.805, 8.0, 0.0]]))
    assert not clipped.any()


def test_supervised_loss_by_hand():
    """−log 0.6 − log 0.2 = 2.120264; an empty response 0."""
    mask = torch.tensor([[True, True, False], [False, False, False]])
    assert supervised_loss(CURRENT, mask).tolist() == [pytest.approx(2.120264, abs=1e-6), 0.0]
