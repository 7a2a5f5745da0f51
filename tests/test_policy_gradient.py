"""PPO, RLOO and best-of-n on the loop: gradients that do not depend on how a batch is cut, what is saved, settings that are refused."""

import pytest
import torch
from tiny_run import settings, train
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from async_rlhf.advantages import leave_one_out
from async_rlhf.batching import micro_batches, split_to
from async_rlhf.config import UserError, parse
from async_rlhf.models import Policy
from async_rlhf.optimization import ModuleOptimizer
from async_rlhf.value import ValueModel
from online_dpo import OnlineDPOConfig
from ppo import PPOConfig
from rloo import RLOOConfig

CASES = {
    "dpo": (OnlineDPOConfig, {}),
    "ppo": (PPOConfig, {}),
    "ppo, next token": (PPOConfig, {"score_at": "next_token"}),
    "rloo": (RLOOConfig, {}),
    "rloo, token ratio": (RLOOConfig, {"ratio_level": "token"}),
    "rloo, kl in the loss": (RLOOConfig, {"kl_in": "loss"}),
    "copg": (RLOOConfig, {"loss_type": "copg"}),
    "best of n": (RLOOConfig, {"loss_type": "best_of_n"}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_does_not_depend_on_how_the_batch_is_cut(name, model_folder, prompts_file, reward_file, tmp_path, monkeypatch):
    """The same 32 samples (16 prompts × 2, of unequal lengths) in 1, 4 and 16 forwards."""
    config_class, changes = CASES[name]
    gradients = []

    def keep_gradient(self):
        gradients.append(torch.cat([p.grad.flatten() for p in self.module.parameters() if p.grad is not None]).clone())
        self.optimizer.zero_grad()

    monkeypatch.setattr(ModuleOptimizer, "_check_and_step", keep_gradient)
    for size in (32, 8, 2):
        train(
            settings(
                model_folder, prompts_file, reward_file, tmp_path / str(size), config_class, per_device_train_batch_size=size,
                gradient_accumulation_steps=32 // size, total_episodes=32, save_steps=1, **changes,
            )
        )  # fmt: skip
    whole, *parts = gradients
    assert whole.norm() > 0
    for part in parts:
        assert (part - whole).norm() / whole.norm() < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_two_batches_stale_and_two_epochs_train_and_save(name, model_folder, prompts_file, reward_file, tmp_path):
    config_class, changes = CASES[name]
    config = settings(
        model_folder, prompts_file, reward_file, tmp_path / "run", config_class, max_staleness=2, num_mini_batches=2, num_ppo_epochs=2,
        per_device_train_batch_size=8, **changes,
    )  # fmt: skip
    metrics, model = train(config)
    assert all(torch.isfinite(torch.tensor(value)) for record in metrics for value in record.values())
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-4", dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), model.parameters(), strict=True))
    start = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    assert any(not torch.equal(a, b) for a, b in zip(saved.parameters(), start.parameters(), strict=True))
    value_folder = tmp_path / "run" / "checkpoint-4" / "value_model"
    assert value_folder.exists() == (config_class is PPOConfig)
    if config_class is PPOConfig:
        value = AutoModelForSequenceClassification.from_pretrained(value_folder, dtype=torch.float32)
        assert value.score.weight.abs().sum() > 0  # it started at 0: the reward is a function, so the policy's body gave the start
        assert {"loss/value", "value/mean", "value/clip_frac", "policy/clip_frac"} <= metrics[-1].keys()


def test_ppo_with_adapters_saves_whole_models(model_folder, prompts_file, reward_file, tmp_path):
    """LoRA on policy and value model, the head trained whole: both folders load without peft."""
    config = settings(
        model_folder, prompts_file, reward_file, tmp_path / "run", PPOConfig, use_peft=True, lora_target_modules=["q_proj"], max_staleness=1
    )
    metrics, _ = train(config)
    assert max(record["mismatch/logprob_abs"] for record in metrics) < 1e-4  # the generator samples from the merged policy
    folder = tmp_path / "run" / "checkpoint-4"
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    value, report = AutoModelForSequenceClassification.from_pretrained(
        folder / "value_model", dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"] and value.score.weight.abs().sum() > 0


def test_value_warm_up_leaves_the_policy_alone(model_folder, prompts_file, reward_file, tmp_path):
    config = settings(
        model_folder, prompts_file, reward_file, tmp_path / "run", PPOConfig, value_warmup_updates=4, weight_decay=0.5, num_mini_batches=2,
        per_device_train_batch_size=8,
    )  # fmt: skip
    metrics, model = train(config)
    start = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters(), strict=True))
    assert metrics[-1]["value/error_squared"] < metrics[0]["value/error_squared"]


def test_epochs_stop_at_the_target_kl_and_the_schedule_goes_on(model_folder, prompts_file, reward_file, tmp_path):
    changes = {"num_ppo_epochs": 3, "learning_rate": 1e-2}
    free, _ = train(settings(model_folder, prompts_file, reward_file, tmp_path / "free", PPOConfig, **changes))
    stopped, _ = train(settings(model_folder, prompts_file, reward_file, tmp_path / "stopped", PPOConfig, target_kl=1e-9, **changes))
    assert [record["policy/stopped_epochs"] for record in free] == [0, 0, 0, 0]
    assert stopped[0]["policy/stopped_epochs"] == 0.5  # the second epoch shows a KL, so the third is left out
    assert [record["lr"] for record in stopped] == [record["lr"] for record in free]


def test_an_adaptive_kl_coefficient_follows_its_target(model_folder, prompts_file, reward_file, tmp_path):
    """KL 0 at first: the coefficient falls by 20% · 16/100 in the first update."""
    config = settings(
        model_folder, prompts_file, reward_file, tmp_path / "run", PPOConfig, adaptive_kl_target=5.0, adaptive_kl_horizon=100.0, kl_coef=1.0
    )
    metrics, _ = train(config)
    assert [record["ppo/kl_coef"] for record in metrics][:2] == pytest.approx([1.0, 1 - 0.2 * 0.16], abs=1e-6)


def test_the_value_is_read_before_each_token_and_after_the_last(model_folder, tokenizer):
    """Shared and plain prompts agree, and entry t is the classifier's score of prompt + t tokens."""
    model = AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=1, dtype=torch.float32).eval()
    torch.nn.init.normal_(model.score.weight)
    prompts, responses = [[5, 6, 7], [8]], [[[9, 10], [11, 12]], [[13, 14], [15, 16]]]
    tokens = {
        "prompt_ids": torch.tensor([prompts[0], [0, 0, 8]]),
        "prompt_length": torch.tensor([3, 1]),
        "response_ids": torch.tensor(responses),
        "response_length": torch.tensor([[2, 2], [2, 2]]),
    }
    shared, plain = (ValueModel(model, share)(**tokens).detach() for share in (True, False))
    assert shared.shape == (2, 2, 3)
    torch.testing.assert_close(shared, plain, atol=1e-5, rtol=0)
    for p, prompt in enumerate(prompts):
        for k, response in enumerate(responses[p]):
            for t in range(3):
                ids = torch.tensor([prompt + response[:t]])
                alone = model.score(model.base_model(ids).last_hidden_state[:, -1])[0, 0]
                assert shared[p, k, t].item() == pytest.approx(alone.item(), abs=1e-5)


def test_recomputed_old_logprobs_are_the_trainers_own(model_folder, prompts_file, reward_file, tmp_path, monkeypatch):
    """At staleness 1 the first step's ratio is 1 when it divides by the trainer's own log-probabilities, and not by the engine's."""
    seen = {}
    for old in ("engine", "recompute"):
        config = settings(
            model_folder, prompts_file, reward_file, tmp_path / old, RLOOConfig, max_staleness=1, old_logprobs=old, learning_rate=5e-3,
            clip_range=1e-4,
        )  # fmt: skip
        metrics, _ = train(config)
        seen[old] = [record["policy/clip_frac"] for record in metrics]
    assert max(seen["recompute"]) == 0 < max(seen["engine"])


@pytest.mark.parametrize(
    ("config_class", "arguments", "message"),
    [
        (RLOOConfig, ["--num_generations", "1", "--per_device_train_batch_size", "4"], "compared with the others of its prompt"),
        (RLOOConfig, ["--loss_type", "copg", "--kl_coef", "0"], "copg holds the KL itself"),
        (
            RLOOConfig,
            ["--loss_type", "best_of_n", "--correction", "mask_sequence"],
            "correction mask_sequence: loss_type best_of_n has no ratio",
        ),
        (RLOOConfig, ["--loss_type", "copg", "--old_logprobs", "recompute"], "old_logprobs recompute: loss_type copg has no ratio"),
        (RLOOConfig, ["--top_p", "0.9"], "does not describe what was sampled"),
        (PPOConfig, ["--target_kl", "-1"], "target_kl -1.0: above 0, or null"),
        (RLOOConfig, ["--correction", "mask_token"], "with ratio_level sequence a loss is of a whole response"),
        (RLOOConfig, ["--correction", "truncate_sequence"], "set old_logprobs: recompute"),
        (PPOConfig, ["--correction", "truncate_token"], "set old_logprobs: recompute"),
        (PPOConfig, ["--lam", "1.5"], "lam 1.5"),
        (PPOConfig, ["--correction_high", "0.5"], "1, on-policy, must be inside"),
    ],
)
def test_settings_without_meaning_are_refused(config_class, arguments, message):
    with pytest.raises(UserError) as caught:
        parse(config_class, arguments)
    assert message in str(caught.value)


def test_forwards_hold_rows_of_like_length_within_the_budget():
    """Prompts of 10 to 100 tokens, 2 responses of up to 20: no forward is larger than 4 of the longest rows, and little is padding."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(10, 101, (64,), generator=generator)
    responses = torch.randint(1, 21, (64, 2), generator=generator)
    chunks = micro_batches({"prompt_length": prompts, "response_length": responses}, 4)
    assert sorted(torch.cat(chunks).tolist()) == list(range(64))
    sizes = [len(chunk) * int(prompts[chunk].max() + 2 * responses[chunk].max()) for chunk in chunks]
    assert max(sizes) <= 4 * int(prompts.max() + 2 * responses.max())
    rows = prompts + 2 * responses.amax(1)
    used, padded = int(rows.sum()), sum(sizes)
    assert 1 - used / padded < 0.10
    assert len(chunks) < 32  # 64 one by one; 16 at 4 a time, a third of them padding


def test_rows_that_fit_one_forward_keep_their_order():
    (only,) = micro_batches({"prompt_length": torch.tensor([3, 9, 5]), "response_length": torch.tensor([[1], [2], [3]])}, 3)
    assert only.tolist() == [0, 1, 2]


def test_ranks_with_fewer_forwards_split_theirs():
    chunks = split_to([torch.tensor([4]), torch.tensor([0, 1, 2, 3, 5])], 4)
    assert len(chunks) == 4 and sorted(torch.cat(chunks).tolist()) == [0, 1, 2, 3, 4, 5] and all(map(len, chunks))


def test_equal_scores_teach_rloo_nothing():
    assert leave_one_out(torch.tensor([[0.1, 0.1, 0.1], [1.0, 2.0, 6.0]])).tolist() == [[0, 0, 0], [-3.0, -1.5, 4.5]]


def test_policy_knows_its_vocabulary(model_folder, tokenizer):
    assert Policy(AutoModelForCausalLM.from_pretrained(model_folder)).vocabulary == len(tokenizer)
