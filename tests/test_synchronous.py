"""`max_staleness: 0` is the synchronous run: bit for bit a plain loop without thread, queue or snapshot."""

import dataclasses
import json
import threading

import numpy as np
import pytest
import torch
from tiny_run import PROMPTS, UPDATES, K, settings, train
from transformers import AutoModelForCausalLM

from async_rlhf.generation import HFGenerator, Sampling
from async_rlhf.losses import preference_loss, select_pairs
from async_rlhf.models import Policy, length_mask, pad_tokens
from async_rlhf.rewards import RewardContext, Sample, load_rewards
from async_rlhf.rollout import Prompt
from async_rlhf.trainer import Trainer
from online_dpo import OnlineDPO


def plain_loop(config, tokenizer):
    """Generate, score, update. Returns the losses and the trained model."""
    model = AutoModelForCausalLM.from_pretrained(config.model_name_or_path, dtype=torch.float32).train()
    frozen = AutoModelForCausalLM.from_pretrained(config.model_name_or_path, dtype=torch.float32).eval()
    reference = Policy(frozen.requires_grad_(False))  # a weight that could train takes another kernel, even without gradients
    rows = [json.loads(line) for line in open(config.dataset_name)]
    ids = [tokenizer(row["text"])["input_ids"] for row in rows]
    order = np.random.default_rng([config.seed, 0]).permutation(len(ids))
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, weight_decay=0.0)
    reward = load_rewards(config.rewards, "reward", RewardContext()).parts[0].reward
    sampling = Sampling(K, config.response_length, (tokenizer.eos_token_id,), config.temperature, seed=config.seed)
    losses = []
    for update in range(UPDATES):
        prompts = [Prompt(p, order[p], ids[order[p]]) for p in range(update * PROMPTS, (update + 1) * PROMPTS)]
        rollouts = HFGenerator(model, tokenizer.pad_token_id).generate(prompts, sampling)
        mixed = np.random.default_rng([config.seed, update, 1]).permutation(PROMPTS)
        groups = [rollouts[K * i : K * i + K] for i in mixed]
        ends = tokenizer.eos_token_id
        texts = [tokenizer.decode([t for t in r.response_ids if t != ends], skip_special_tokens=True) for group in groups for r in group]
        scores = reward([Sample("", text) for text in texts]).view(PROMPTS, K)
        tokens = pad_tokens(
            [group[0].prompt_ids for group in groups], [[r.response_ids for r in g] for g in groups], tokenizer.pad_token_id
        )
        with torch.no_grad():
            ref = reference(**tokens, temperature=config.temperature)
        best, worst, tied = select_pairs(scores)
        assert not tied.any()  # the trainer adds a pair that weighs nothing, and so rounds otherwise
        pair, at = torch.stack([best, worst], 1), torch.arange(PROMPTS)[:, None]
        tokens = {**tokens, "response_ids": tokens["response_ids"][at, pair], "response_length": tokens["response_length"][at, pair]}
        logprobs = Policy(model)(**tokens, temperature=config.temperature)
        mask = length_mask(tokens["response_length"], logprobs.shape[-1])
        logratio = torch.where(mask, logprobs - ref[at, pair], 0.0).sum(-1)
        loss = preference_loss(logratio[:, 0], logratio[:, 1], config.beta).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.param_groups[0]["lr"] = config.learning_rate * (1 - update / UPDATES)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("own_copy", [False, True], ids=["training model", "snapshots"])
def test_staleness_0_equals_the_plain_loop_bit_for_bit(model_folder, prompts_file, tokenizer, tmp_path, own_copy, monkeypatch):
    reward_file = tmp_path / "distinct.py"
    reward_file.write_text(
        "import zlib\n\n\ndef letters(samples):\n    return [zlib.crc32(s.response.encode()) / 2**32 for s in samples]\n"
    )
    config = settings(model_folder, prompts_file, reward_file, tmp_path / "run")
    if own_copy:  # the generator samples from published snapshots, as it does in every asynchronous run
        monkeypatch.setattr(Trainer, "_shares_model", lambda self: False)
    metrics, model = train(config)
    losses, expected = plain_loop(config, tokenizer)
    assert [record["loss/policy"] for record in metrics] == losses
    for (name, a), (_, b) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / f"checkpoint-{UPDATES}", dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), expected.parameters(), strict=True))


def test_two_runs_of_one_seed_agree_in_every_metric_and_another_seed_differs(model_folder, prompts_file, reward_file, tmp_path):
    runs = []
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        config = settings(model_folder, prompts_file, reward_file, tmp_path / name, seed=seed, max_staleness=1, num_mini_batches=2)
        timed = ("time/", "throughput/")
        runs.append([{name: value for name, value in record.items() if not name.startswith(timed)} for record in train(config)[0]])
    assert runs[0] == runs[1] and len(runs[0]) == UPDATES / 2
    assert all(a["loss/policy"] != b["loss/policy"] for a, b in zip(runs[0], runs[2], strict=True))


def test_accumulation_and_mini_batches_leave_the_gradient_alone(model_folder, prompts_file, reward_file, tmp_path):
    """16 completions in one forward, in 2 and in 8 accumulated ones: the same losses and weights."""
    results = []
    for size in (16, 8, 2):
        changes = dict(per_device_train_batch_size=size, gradient_accumulation_steps=16 // size)
        metrics, model = train(settings(model_folder, prompts_file, reward_file, tmp_path / str(size), **changes))
        results.append(([record["loss/policy"] for record in metrics], torch.cat([p.detach().flatten() for p in model.parameters()])))
    for losses, weights in results[1:]:
        assert losses == pytest.approx(results[0][0], abs=1e-5)
        torch.testing.assert_close(weights, results[0][1], atol=2e-4, rtol=0)


def test_dials_are_logged_as_what_they_are(model_folder, prompts_file, reward_file, tmp_path):
    """S 1, N 2, 2 epochs: batches 0, 1, 1, …; steps behind 0…3 on the first batch, then 4…7."""
    changes = dict(max_staleness=1, num_mini_batches=2, num_ppo_epochs=2, per_device_train_batch_size=8)
    metrics, _ = train(settings(model_folder, prompts_file, reward_file, tmp_path / "run", **changes))
    assert [record["staleness/batches_mean"] for record in metrics] == [0, 1, 1, 1]
    assert [(record["staleness/steps_mean"], record["staleness/steps_max"]) for record in metrics] == [(1.5, 3)] + 3 * [(5.5, 7)]
    assert metrics[-1]["lr"] > 0
    assert metrics[0]["policy/ratio_max"] != 1


def test_metrics_have_every_name_that_applies(model_folder, prompts_file, reward_file, tmp_path):
    metrics, _ = train(settings(model_folder, prompts_file, reward_file, tmp_path / "run", max_staleness=1, eval_steps=2,
                              eval_split="train[:10]", num_eval_prompts=6, report_to=["tensorboard"]))  # fmt: skip
    names = """episode step version lr loss/policy objective/score
    objective/score_std objective/kl objective/entropy objective/rlhf_reward policy/ratio_mean policy/ratio_max
    policy/ess policy/approx_kl dpo/margin dpo/accuracy dpo/tied_frac dpo/skipped_steps
    rollout/response_length rollout/eos_frac rollout/tokens staleness/batches_mean staleness/batches_max staleness/steps_mean
    staleness/steps_max mismatch/logprob_abs time/update time/generate time/score time/train
    time/weight_sync time/trainer_wait time/generator_wait throughput/episodes_per_s throughput/tokens_per_s""".split()
    assert all(set(names) <= record.keys() for record in metrics[:-1])
    assert [record["episode"] for record in metrics] == [16, 32, 48, 64]
    assert max(record["mismatch/logprob_abs"] for record in metrics if "mismatch/logprob_abs" in record) < 1e-4
    evaluations = [json.loads(line) for line in open(tmp_path / "run" / "eval.jsonl")]
    assert [record["version"] for record in evaluations] == [0, 2, 4]
    assert len(open(tmp_path / "run" / "completions" / "eval-000004.jsonl").readlines()) == 6
    assert list((tmp_path / "run").rglob("events.out.tfevents*"))


def test_a_gradient_that_is_not_finite_ends_the_run_before_it_reaches_the_weights(
    model_folder, prompts_file, reward_file, tmp_path, monkeypatch
):
    monkeypatch.setattr("online_dpo.preference_loss", lambda chosen, rejected, *_: (chosen - rejected) * float("nan"))
    config = settings(model_folder, prompts_file, reward_file, tmp_path / "run", max_staleness=1)
    trainer = Trainer(config, OnlineDPO(config))
    with pytest.raises(FloatingPointError, match="gradient of optimizer step 0 is nan; no weights are saved"):
        trainer.run()
    start = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(trainer.optimizer.model.parameters(), start.parameters(), strict=True))
    assert not any(thread.name == "generation" for thread in threading.enumerate())


def test_a_batch_of_ties_is_skipped_and_counted(model_folder, prompts_file, tmp_path):
    (tmp_path / "flat.py").write_text("def flat(samples):\n    return [0.5] * len(samples)\n")
    config = settings(model_folder, prompts_file, "", tmp_path / "run", reward_model_path=f"{tmp_path}/flat.py:flat")
    metrics, model = train(config)
    assert [(r["dpo/tied_frac"], r["dpo/skipped_steps"]) for r in metrics] == [(1.0, 1.0)] * UPDATES
    start = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters(), strict=True))


def test_replayed_rollouts_train_the_same(model_folder, prompts_file, reward_file, tmp_path):
    recorded, model = train(settings(model_folder, prompts_file, reward_file, tmp_path / "a", max_staleness=1, dump_rollouts=True))
    changes = dict(max_staleness=1, generator="replay", replay_path=str(tmp_path / "a" / "rollouts.jsonl"))
    replayed, again = train(settings(model_folder, prompts_file, reward_file, tmp_path / "b", **changes))
    assert [r["loss/policy"] for r in recorded] == [r["loss/policy"] for r in replayed]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_lora_trains_the_adapter_alone_and_saves_a_whole_model(model_folder, prompts_file, reward_file, tmp_path):
    config = settings(model_folder, prompts_file, reward_file, tmp_path / "run", max_staleness=1, use_peft=True,
                      lora_target_modules=["q_proj", "v_proj"])  # fmt: skip
    metrics, model = train(config)
    assert metrics[0]["loss/policy"] == pytest.approx(np.log(2), abs=1e-4)
    assert abs(metrics[0]["objective/kl"]) < 1e-3  # the reference is the model without its adapter
    assert max(r["mismatch/logprob_abs"] for r in metrics if "mismatch/logprob_abs" in r) < 1e-4
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / f"checkpoint-{UPDATES}", dtype=torch.float32).eval()
    ids = torch.tensor([[40, 41, 42]])
    with torch.no_grad():
        torch.testing.assert_close(saved(ids).logits, model.eval()(ids).logits, atol=1e-5, rtol=1e-5)


def test_another_runs_folder_is_not_overwritten(model_folder, prompts_file, reward_file, tmp_path):
    from async_rlhf.config import UserError

    config = settings(model_folder, prompts_file, reward_file, tmp_path / "run")
    train(config)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    (tmp_path / "run" / "mine.jsonl").write_text("{}")
    with pytest.raises(UserError, match="holds another run"):
        Trainer(config, OnlineDPO(config))
    bad = settings(model_folder, prompts_file, reward_file, tmp_path / "run", overwrite_output_dir=True, prompt_column="absent")
    with pytest.raises(UserError, match="no column absent"):
        Trainer(bad, OnlineDPO(bad))
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
    Trainer(dataclasses.replace(config, overwrite_output_dir=True), OnlineDPO(config))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert (tmp_path / "run" / "mine.jsonl").exists()
