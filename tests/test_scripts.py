"""The scripts as a user types them, tiny: SFT from scratch, made and relabelled pairs, a reward model, Online DPO, dry runs."""

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from datasets import load_from_disk
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_rlhf.rewards.model import RewardModel
from relabel_with_rm import swap_sides

TINY = '{"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 1}'


@pytest.fixture(scope="module")
def sft(work, prompts_file, run_script):
    run_script(
        "sft.py", "--from_scratch", "--scratch_model", TINY, "--scratch_vocab_size=300", "--max_length=48",
        f"--dataset_name={prompts_file}", "--prompt_column=text", "--completion_column=answer", "--max_steps=20",
        "--per_device_train_batch_size=8", "--learning_rate=3e-3", f"--output_dir={work / 'sft'}", "--save_strategy=no",
        "--logging_steps=5",
    )  # fmt: skip
    return work / "sft"


def test_sft_with_an_adapter_gives_a_whole_model(work, sft, prompts_file, run_script):
    output = work / "sft_lora"
    run_script(
        "sft.py", f"--model_name_or_path={sft}", f"--dataset_name={prompts_file}", "--prompt_column=text", "--completion_column=answer",
        "--use_peft", "--lora_target_modules=q_proj", "--max_length=48", "--max_steps=3", "--learning_rate=1e-2", f"--output_dir={output}",
        "--save_strategy=no",
    )  # fmt: skip
    names = {path.name for path in output.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "run_config.json"} <= names and "adapter_config.json" not in names
    before, after = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (sft, output))
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed and all("q_proj" in name for name in changed)


@pytest.fixture(scope="module")
def pairs(work, sft, prompts_file, reward_file, run_script):
    done = run_script(
        "relabel_with_rm.py", f"--dataset_name={prompts_file}", "--prompt_column=text", f"--model_name_or_path={sft}", "--generator=hf",
        f"--reward_model_path={reward_file}:letters", "--num_generations=3", "--response_length=8", "--max_prompt_length=32",
        f"--output_dir={work / 'pairs'}",
    )  # fmt: skip
    assert "prompts gave no pair" in done.stdout
    return work / "pairs"


def test_sft_from_scratch_gives_a_loadable_folder(sft):
    tokenizer, model = AutoTokenizer.from_pretrained(sft), AutoModelForCausalLM.from_pretrained(sft)
    assert tokenizer.eos_token == "<eos>" != tokenizer.pad_token
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_made_pairs_hold_best_and_worst_with_their_scores(pairs, reward_file):
    rows = load_from_disk(str(pairs))["train"]
    assert 0 < len(rows) <= 48
    for row in rows:
        assert row["score_chosen"] > row["score_rejected"]
        assert row["score_chosen"] == pytest.approx(row["chosen"].count("a") + len(row["chosen"]) / 100, abs=1e-5)
        assert row["prompt"] == row["text"]


def test_a_reward_model_trains_on_the_pairs_and_scores(work, sft, pairs, run_script):
    folder = work / "rm"
    run_script(
        "reward_modeling.py", f"--model_name_or_path={sft}", f"--dataset_name={pairs}", "--max_length=48", "--max_steps=4",
        "--per_device_train_batch_size=8", f"--output_dir={folder}", "--save_strategy=no",
    )  # fmt: skip
    reward = RewardModel(str(folder), policy_tokenizer=AutoTokenizer.from_pretrained(sft))
    assert reward.reuses_ids
    assert reward.max_length == 48


def test_relabelling_swaps_sides_with_all_that_belongs_to_them(work, reward_file, run_script):
    rows = [
        {"prompt": "p", "chosen": "x", "rejected": "aa", "chosen_model": "m1", "rejected_model": "m2", "id": 1},
        {"prompt": "p", "chosen": "aaa", "rejected": "x", "chosen_model": "m3", "rejected_model": "m4", "id": 2},
    ]
    path = work / "labelled.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run_script(
        "relabel_with_rm.py", f"--dataset_name={path}", f"--reward_model_path={reward_file}:letters", f"--output_dir={work / 'relabelled'}"
    )
    assert "1 of 2 pairs swapped" in done.stdout
    first, second = load_from_disk(str(work / "relabelled"))["train"]
    assert (first["chosen"], first["chosen_model"], first["rejected"], first["rejected_model"], first["id"]) == ("aa", "m2", "x", "m1", 1)
    assert (second["chosen"], second["chosen_model"]) == ("aaa", "m3")
    assert first["score_chosen"] == pytest.approx(2.02)
    assert first["score_rejected"] == pytest.approx(0.01)


def test_swap_leaves_lone_columns_alone():
    row = {"good": 1, "bad": 2, "chosen_note": "a", "rejected_note": "b", "chosen_only": "c"}
    assert swap_sides(row, "good", "bad") == {"good": 2, "bad": 1, "chosen_note": "b", "rejected_note": "a", "chosen_only": "c"}


def test_two_processes_train_like_one(model_folder, prompts_file, reward_file, tmp_path):
    """The same global batch on 1 and on 2 processes (gloo): the same losses, scores and final weights."""
    (tmp_path / "output_dir").mkdir()  # no link can be made there, and whoever thinks itself the main process says so
    records, weights = [], []
    for processes in (1, 2):
        output = tmp_path / str(processes)
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes, ROOT / "online_dpo.py"),
            *(f"--dataset_name={prompts_file}", "--prompt_column=text", f"--model_name_or_path={model_folder}"),
            *(f"--reward_model_path={reward_file}:letters", f"--output_dir={output}", "--generator=hf", "--max_staleness=1"),
            *("--response_length=6", "--max_prompt_length=32", f"--per_device_train_batch_size={8 // processes}"),
            *("--num_mini_batches=2", "--total_episodes=64", "--learning_rate=1e-3", "--save_steps=100"),
            *("--eval_split=train[:7]", "--eval_steps=2"),
        ]
        on_cpu = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, env=on_cpu, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-4000:]
        assert done.stdout.count("no link to the results") == 1
        records.append([json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()])
        weights.append(load_file(output / "checkpoint-4" / "model.safetensors"))
    for one, two in zip(*records, strict=True):
        for name in ("loss/policy", "objective/score", "objective/kl", "policy/ess", "dpo/tied_frac", "staleness/steps_mean"):
            assert two[name] == pytest.approx(one[name], abs=1e-5), name
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, atol=2e-4, rtol=0)


def test_dry_run_prints_the_plan_and_loads_no_model(model_folder, prompts_file, reward_file, tmp_path, run_script):
    done = run_script(
        "online_dpo.py", "--dry_run", f"--dataset_name={prompts_file}", "--prompt_column=text", f"--model_name_or_path={model_folder}",
        f"--reward_model_path={reward_file}:letters", f"--output_dir={tmp_path / 'run'}", "--per_device_train_batch_size=42",
        "--gradient_accumulation_steps=8", "--total_episodes=10080", "--save_steps=4", env={"WORLD_SIZE": "3"},
    )  # fmt: skip
    assert "504 prompts × 2 = 1008 completions" in done.stdout
    assert "10 updates, 10080 episodes, 10 optimizer steps" in done.stdout
    assert "staleness: 1 batches (exact)" in done.stdout
    assert "3 training processes" in done.stdout
    assert "checkpoint-4, checkpoint-8, checkpoint-10" in done.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("script", "fields", "name"),
    [
        ("ppo.py", ["--num_generations=1", "--adaptive_kl_target=4"], "loss/value"),
        ("rloo.py", ["--num_generations=4"], "rloo/advantage_abs"),
        ("rloo.py", ["--loss_type=best_of_n"], "rloo/tied_frac"),
    ],
    ids=["ppo", "rloo", "best of n"],
)
def test_the_other_algorithms_run_as_typed(script, fields, name, model_folder, prompts_file, reward_file, tmp_path, run_script):
    run_script(
        script, f"--dataset_name={prompts_file}", "--prompt_column=text", f"--model_name_or_path={model_folder}", *fields,
        f"--reward_model_path={reward_file}:letters", f"--output_dir={tmp_path / 'run'}", "--generator=hf", "--max_staleness=1",
        "--response_length=6", "--max_prompt_length=32", "--per_device_train_batch_size=8", "--total_episodes=32", "--learning_rate=1e-3",
    )  # fmt: skip
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(records) == 4 and name in records[-1] and records[-1]["staleness/batches_max"] == 1
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-4") is not None
    assert (tmp_path / "run" / "checkpoint-4" / "value_model" / "config.json").exists() == (script == "ppo.py")
