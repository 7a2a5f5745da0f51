"""Preference losses and the importance weights of pairs, by hand and against TRL's trainer."""

import dataclasses
import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from tiny_run import settings, train

from async_rlhf.algorithm import ScoredBatch
from async_rlhf.config import UserError
from async_rlhf.losses import MAX_LOG_RATIO, pair_log_weights, pair_weights, preference_loss, sequence_sum
from async_rlhf.metrics import Metrics
from async_rlhf.models import Policy, length_mask, scratch_causal_lm
from online_dpo import OnlineDPO


def one(loss_type, label_smoothing=0.0, h=2.0, beta=0.1):
    return preference_loss(torch.tensor([h]), torch.tensor([0.0]), beta, loss_type, label_smoothing).item()


def test_smoothed_and_hinge_losses_by_hand():
    """βh = 0.2: L = log(1 + e^−0.2) = 0.598139 and L(−h) = L + 0.2 = 0.798139. ε = 0.1: conservative 0.9·L + 0.1·(L + 0.2) = L + 0.02;
    robust (0.9·L − 0.1·(L + 0.2)) / 0.8 = L − 0.025. Hinge 1 − 0.2, and 0 from βh = 1 on."""
    assert one("sigmoid", 0.1) == pytest.approx(0.618139, abs=1e-6)
    assert one("robust", 0.1) == pytest.approx(0.573139, abs=1e-6)
    assert one("robust", 0.0) == pytest.approx(one("sigmoid"), abs=1e-7)
    assert one("hinge") == pytest.approx(0.8, abs=1e-6)
    assert one("hinge", h=-2.0) == pytest.approx(1.2, abs=1e-6)
    assert one("hinge", h=11.0) == 0


def test_robust_loss_over_flipped_labels_is_the_clean_one():
    for h in (-3.0, 0.0, 0.7, 12.0):
        noisy = 0.7 * one("robust", 0.3, h, 0.5) + 0.3 * one("robust", 0.3, -h, 0.5)
        assert noisy == pytest.approx(one("sigmoid", 0.0, h, 0.5), abs=1e-5)


@pytest.mark.parametrize("loss_type, smoothing", [("sigmoid", 0), ("sigmoid", 0.1), ("ipo", 0), ("hinge", 0), ("robust", 0.2)])
@pytest.mark.parametrize("h", [200.0, -200.0])
def test_losses_and_gradients_are_finite_far_away(loss_type, smoothing, h):
    chosen = torch.tensor([h], requires_grad=True)
    loss = preference_loss(chosen, torch.tensor([0.0]), 1.0, loss_type, smoothing)
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(chosen.grad).all()


def trl_loss(logprobs, ref_logprobs, mask, beta, loss_type, label_smoothing):
    """The loss that TRL's DPO trainer computes of one pair, `[2, R]` each, given a model that answers with these log-probabilities."""
    from trl import DPOTrainer

    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x),
        beta=beta,
        loss_types=[loss_type],
        loss_weights=[1.0],
        label_smoothing=label_smoothing,
        f_divergence_type="reverse_kl",
        ld_alpha=None,
        precompute_ref_logps=True,
        use_weighting=False,
        aux_loss_enabled=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    completion_mask = torch.nn.functional.pad(mask.long(), (1, 0))  # a prompt of one token before each response
    reference = sequence_sum(ref_logprobs, mask)
    inputs = {
        "input_ids": torch.zeros_like(completion_mask),
        "attention_mask": torch.ones_like(completion_mask),
        "completion_mask": completion_mask,
        "ref_chosen_logps": reference[:1],
        "ref_rejected_logps": reference[1:],
    }
    nothing = torch.zeros_like(logprobs)
    outputs = SimpleNamespace(log_probs=torch.where(mask, logprobs, 0.0), entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())
    return DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, return_outputs=False)


@pytest.mark.parametrize("loss_type, smoothing, lengths", [
    ("sigmoid", 0.0, (5, 2)), ("hinge", 0.0, (3, 5)), ("robust", 0.1, (1, 4)), ("robust", 0.4, (5, 5)),
    ("ipo", 0.0, (1, 1)),  # TRL divides each side's log-ratio by its length, so that only responses of one token compare
])  # fmt: skip
def test_losses_and_gradients_equal_trls(loss_type, smoothing, lengths):
    torch.manual_seed(0)
    mask = length_mask(torch.tensor(lengths), 5)
    reference = -torch.rand(2, 5)
    results = []
    for ours in (True, False):
        logprobs = (-2 * torch.rand(2, 5, generator=torch.Generator().manual_seed(1))).requires_grad_()
        if ours:
            chosen, rejected = sequence_sum(logprobs - reference, mask)
            loss = preference_loss(chosen[None], rejected[None], 0.3, loss_type, smoothing).mean()
        else:
            loss = trl_loss(logprobs, reference, mask, 0.3, loss_type, smoothing)
        loss.backward()
        results.append((loss.detach(), logprobs.grad))
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-5)


PAIR_MASK = torch.tensor([[[True, True, False], [True, False, False]]])


def pair_ratios(*log_ratios):
    """`current` and `behaviour` of a pair of two tokens and one; what stands outside is garbage."""
    current = torch.tensor([[[log_ratios[0], log_ratios[1], float("nan")], [log_ratios[2], float("inf"), 7.0]]]) - 1
    return current.requires_grad_(), torch.full((1, 2, 3), -1.0)


def test_pair_weights_by_hand():
    """Ratios 2 and 3 of the chosen's tokens, ½ of the rejected's: 2 · 3 · ½ = 3; token means √6 · ½ = 1.224745."""
    current, behaviour = pair_ratios(math.log(2), math.log(3), -math.log(2))
    exact = pair_log_weights(current, behaviour, PAIR_MASK)
    assert not exact.requires_grad
    torch.testing.assert_close(exact.exp(), torch.tensor([3.0]))
    torch.testing.assert_close(pair_log_weights(current, behaviour, PAIR_MASK, per_token=True).exp(), torch.tensor([1.224745]))
    torch.testing.assert_close(pair_weights(exact), torch.tensor([3.0]))
    torch.testing.assert_close(pair_weights(exact, cap=2.5), torch.tensor([2.5]))
    torch.testing.assert_close(pair_weights(exact, cap=3.5), torch.tensor([3.0]))
    weights = torch.tensor([3.0, 1.0, 0.6, 0.4, 1.9]).log()
    assert pair_weights(weights, cap=2.0, drop=True).tolist() == [0, 1, 1, 0, 1]


def test_token_means_of_one_token_responses_are_the_exact_weights():
    torch.manual_seed(0)
    current, behaviour, mask = -torch.rand(4, 2, 1), -torch.rand(4, 2, 1), torch.ones(4, 2, 1, dtype=torch.bool)
    exact, mean = (pair_log_weights(current, behaviour, mask, per_token) for per_token in (False, True))
    torch.testing.assert_close(exact, mean)


@pytest.mark.parametrize("per_token", [False, True])
def test_pair_weights_stay_finite_and_empty_responses_weigh_one(per_token):
    for far in (200.0, -200.0):
        weights = pair_weights(pair_log_weights(*pair_ratios(far, far, far), PAIR_MASK, per_token))
        assert torch.isfinite(weights).all()
        assert weights.item() == pytest.approx(math.exp(math.copysign(MAX_LOG_RATIO, far)))
    assert pair_log_weights(*pair_ratios(1.0, 1.0, 1.0), torch.zeros_like(PAIR_MASK), per_token).item() == 0


@pytest.mark.parametrize("changes, message", [
    (dict(label_smoothing=0.5, loss_type="robust"), "label_smoothing 0.5: 0 or more, below 0.5"),
    (dict(label_smoothing=-0.1), "label_smoothing -0.1"),
    (dict(label_smoothing=0.1, loss_type="hinge"), "label_smoothing 0.1 has no meaning for loss_type hinge"),
    (dict(label_smoothing=0.1, loss_type="ipo"), "label_smoothing 0.1 has no meaning for loss_type ipo"),
    (dict(loss_type="robust"), "loss_type robust with label_smoothing 0 is sigmoid"),
    (dict(pair_weight_cap=0.5), "pair_weight_cap 0.5: 1 or more"),
    (dict(off_policy_correction="mask", pair_weight_cap=None), "off_policy_correction mask with pair_weight_cap None"),
    (dict(off_policy_correction="mask", pair_weight_cap=1.0), "needs a cap above 1"),
    (dict(off_policy_correction="sequence", top_p=0.9), "off_policy_correction sequence with top_p"),
    (dict(off_policy_correction="group", top_k=5), "off_policy_correction group with top_p or top_k"),
])  # fmt: skip
def test_settings_without_a_meaning_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        settings("model", "prompts", "reward", "out", **changes)


def scored_batch(scores, lengths, vocabulary=50):
    """Random prompts, responses and log-probabilities for `scores [p, k]` and response `lengths [p, k]`."""
    p, k = scores.shape
    generator = torch.Generator().manual_seed(0)
    width = int(lengths.max())
    prompt_length = torch.randint(2, 7, (p,), generator=generator)
    tokens = {
        "prompt_ids": torch.randint(3, vocabulary, (p, 6), generator=generator),
        "prompt_length": prompt_length,
        "response_ids": torch.randint(3, vocabulary, (p, k, width), generator=generator),
        "response_length": lengths,
    }
    behaviour, reference = (-5 - torch.rand(p, k, width, generator=generator) / 2 for _ in range(2))
    return ScoredBatch(0, [], tokens, length_mask(lengths, width), scores, behaviour, reference, torch.zeros(len(scores)), None)


def test_a_groups_row_is_the_pair_and_then_the_others():
    scores = torch.tensor([[0.0, 3.0, -1.0, 2.0], [1.0, 1.0, 1.0, 1.0], [5.0, 5.0, 4.0, 4.0]])
    scored = scored_batch(scores, torch.tensor([[1, 2, 3, 4], [1, 1, 1, 1], [1, 2, 3, 4]]))
    config = settings("model", "prompts", "reward", "out", num_generations=4, off_policy_correction="group")
    batch = OnlineDPO(config).make_batch(scored, Metrics())
    assert batch["response_length"].tolist() == [[2, 3, 1, 4], [1, 1, 1, 1], [1, 3, 2, 4]]
    assert batch["behaviour_logprobs"][0].equal(scored.behaviour_logprobs[0, [1, 2, 0, 3]])
    assert batch["ref_logprobs"].shape[1] == 2
    assert batch["weight"].tolist() == [1, 0, 1]
    pairs = OnlineDPO(dataclasses.replace(config, off_policy_correction="sequence")).make_batch(scored, Metrics())
    assert pairs["response_length"].tolist() == [[2, 3], [1, 1], [1, 3]]


@pytest.mark.parametrize("correction", ["none", "sequence", "group", "token_mean", "mask"])
@pytest.mark.parametrize("share_prompts", [True, False])
def test_micro_batches_leave_the_gradient_of_weighted_pairs_alone(correction, share_prompts, tokenizer):
    """16 pairs of unequal lengths, one of them tied, in 1, 4 (of 1, 3, 5 and 7 pairs) and 16 forwards."""
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(16, 3, generator=generator)
    scores[5] = 1.0
    scored = scored_batch(scores, torch.randint(1, 9, (16, 3), generator=generator))
    config = settings("model", "prompts", "reward", "out", num_generations=3, per_device_train_batch_size=3,
                      off_policy_correction=correction, pair_weight_cap=5.0)  # fmt: skip
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=32)
    algorithm, model = OnlineDPO(config), scratch_causal_lm(sizes, tokenizer, seed=0)
    policy, metrics = Policy(model, share_prompts), Metrics()
    batch = algorithm.make_batch(scored, metrics)
    gradients = []
    for micro_batches in ([16], [1, 3, 5, 7], [1] * 16):
        model.zero_grad()
        parts = {name: tensor.split(micro_batches) for name, tensor in batch.items()}
        for i in range(len(micro_batches)):
            rows = {name: chunks[i] for name, chunks in parts.items()}
            (algorithm.loss(policy, rows, metrics) / batch["weight"].sum()).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    for gradient in gradients[1:]:
        assert (gradient - gradients[0]).norm() < 1e-5 * gradients[0].norm()
    logged = metrics.reduce()
    assert (correction != "none") == ("dpo/weight_mean" in logged)
    if correction != "none":
        assert logged["dpo/weight_max"] > 1.05 * logged["dpo/weight_mean"]  # the weights are not all one
        assert 0 < logged["dpo/weight_ess"] < 1


def test_a_weighted_run_logs_its_weights_and_an_on_policy_one_has_weights_of_one(model_folder, prompts_file, reward_file, tmp_path):
    """Synchronous: π is μ, so the loss is the unweighted one. Asynchronous with k = 4: weights of all four samples."""
    plain, _ = train(settings(model_folder, prompts_file, reward_file, tmp_path / "plain", total_episodes=16))
    on_policy, _ = train(
        settings(model_folder, prompts_file, reward_file, tmp_path / "on", total_episodes=16, off_policy_correction="sequence")
    )
    for name in ("weight_mean", "weight_max", "weight_used", "weight_ess"):
        assert on_policy[0][f"dpo/{name}"] == pytest.approx(1, abs=1e-4), name
    assert on_policy[0]["loss/policy"] == pytest.approx(plain[0]["loss/policy"], abs=1e-4)
    assert not any(name.startswith("dpo/weight") for name in plain[0])
    changes = dict(max_staleness=1, num_generations=4, off_policy_correction="group", pair_weight_cap=1.0, learning_rate=1e-2)
    stale, _ = train(settings(model_folder, prompts_file, reward_file, tmp_path / "stale", **changes))
    last = stale[-1]
    assert last["dpo/weight_max"] > 1 and 0 < last["dpo/weight_cut_frac"] <= 1 and last["dpo/weight_used"] < 1
    assert last["dpo/weight_ess"] < 0.999
