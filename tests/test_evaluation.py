"""Evaluation: the numbers against hand-worked ones, and both scripts end to end against an independent recomputation."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import load_from_disk
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_rlhf.config import UserError
from async_rlhf.data import PromptData
from async_rlhf.evaluation import (
    Generations,
    Measured,
    bootstrap_interval,
    check_comparable,
    check_recorded,
    check_replaceable,
    compare,
    draw,
    markdown_table,
    perplexity,
    sequence_log_ratio,
    summarize,
    win_shares,
)
from async_rlhf.evaluation_config import generations_folder, parse_evaluate_config, parse_generate_config
from async_rlhf.generation import HFGenerator
from async_rlhf.models import save_model, scratch_causal_lm, train_tokenizer
from async_rlhf.runs import find_checkpoints, run_settings

ROOT = Path(__file__).parent.parent
WORDS = ["red", "green", "blue", "tall", "small", "warm", "cold", "quick", "slow", "bright", "dark", "old", "young", "round", "flat"]
STOPS = list(range(100, 150))  # a random model seldom says eos
GOLD = """
def count(samples):
    return [sum(sample.response.count(letter) for letter in sample.columns["letters"]) for sample in samples]
"""


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# -- numbers ------------------------------------------------------------------------------------------------------------------


def test_a_win_is_strict_and_a_tie_is_neither_win_nor_loss():
    wins, ties = win_shares(np.array([[2.0], [1.0], [0.0]]), np.array([[1.0], [1.0], [1.0]]))
    assert wins.tolist() == [1, 0, 0] and ties.tolist() == [0, 1, 0]


def test_every_sample_meets_every_other_of_its_prompt():
    # 3 against {1, 3}: win, tie. 1 against {1, 3}: tie, loss.
    wins, ties = win_shares(np.array([[3.0, 1.0]]), np.array([[1.0, 3.0]]))
    assert wins.tolist() == [0.25] and ties.tolist() == [0.5]


def test_bootstrap_interval():
    assert bootstrap_interval(np.full(7, 0.25), 50, seed=0) == [0.25, 0.25]
    values = np.linspace(0, 1, 100)
    low, high = bootstrap_interval(values, 4000, seed=1)
    # standard deviation √((n+1) / 12(n−1)) = 0.2916, so the mean of 100 is 0.5 ± 1.96 · 0.02916 = 0.5 ± 0.0571
    assert abs(low - 0.4429) < 0.004 and abs(high - 0.5571) < 0.004
    assert bootstrap_interval(values, 4000, seed=1) == [low, high] != bootstrap_interval(values, 4000, seed=2)


def test_bootstrap_is_paired():
    """Two models that differ by exactly 1 on every prompt differ by 1 for certain, however noisy the prompts."""
    baseline = np.random.default_rng(0).normal(0, 50, (40, 1))
    result = compare(baseline + 1, baseline, lambda values: bootstrap_interval(values, 100, 0))
    assert result["score_gain"]["mean"] == pytest.approx(1) and result["score_gain"]["ci"] == pytest.approx([1, 1])
    assert result["head_to_head"] == {
        "win_rate": 1.0,
        "ci": [1.0, 1.0],
        "tie_rate": 0.0,
        "lose_rate": 0.0,
        "net": 1.0,
        "net_ci": [1.0, 1.0],
    }


def test_perplexity_weighs_tokens_not_sequences():
    # Four tokens: 1/2, 1/2, 1/2 and 1/16, so exp(mean nll) = (2·2·2·16)^(1/4) = 128^(1/4)
    assert perplexity([[math.log(0.5)] * 3, [math.log(1 / 16)]]) == pytest.approx(128**0.25)


def test_log_ratio_sums_tokens():
    assert sequence_log_ratio([-1.0, -2.0], [-1.5, -4.0]) == pytest.approx(2.5)


def test_mean_log_ratio_over_samples_is_the_kl():
    """π = (3/4, 1/4) against (1/2, 1/2): of four samples three are the first token, and the mean log-ratio is KL exactly."""
    ratios = [sequence_log_ratio([math.log(p)], [math.log(0.5)]) for p in (0.75, 0.75, 0.75, 0.25)]
    assert np.mean(ratios) == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))


def test_summary_of_two_prompts():
    measured = Measured(
        scores=np.array([[1.0, 3.0], [0.0, 0.0]]),
        lengths=np.array([[2, 4], [6, 8]]),
        finished=np.array([[True, True], [False, True]]),
        sft_logprobs=[[math.log(0.25)] * 2] * 4,
        log_ratios=np.array([[1.0, 3.0], [2.0, 6.0]]),
    )
    results = summarize(measured, np.array([[1.0], [1.0]]), lambda values: [values.min(), values.max()])
    assert results == {
        "win_rate": 0.25,
        "win_rate_ci": [0, 0.5],
        "tie_rate": 0.25,
        "score": 1.0,
        "score_ci": [0, 2],
        "reference_score": 1.0,
        "perplexity": pytest.approx(4),
        "kl": 3.0,
        "kl_ci": [2, 4],
        "response_length": 5.0,
        "eos_rate": 0.75,
    }


def test_table_and_picture_without_sft_model_and_baseline(tmp_path):
    measured = Measured(np.ones((2, 1)), np.ones((2, 1)), np.ones((2, 1)))
    one = summarize(measured, np.zeros((2, 1)), lambda values: bootstrap_interval(values, 10, 0))
    results = {"prompts": 2, "baseline": {}, "checkpoints": {"checkpoint-3": one}}
    table = markdown_table(results)
    assert "| checkpoint-3 | 1.000 [1.000, 1.000] | 0.000 | 1.000 [1.000, 1.000] | – | – | 1.0 | 1.000 |" in table
    assert "baseline" not in table
    draw(results, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


# -- a run's files ------------------------------------------------------------------------------------------------------------


def test_checkpoints_come_in_the_order_of_training(tmp_path):
    for update in (100, 20, 3):
        (tmp_path / f"checkpoint-{update}").mkdir()
        (tmp_path / f"checkpoint-{update}" / "config.json").write_text("{}")
    (tmp_path / "checkpoint-7").mkdir()  # a checkpoint without a model is none
    (tmp_path / ".checkpoint-8.tmp").mkdir()
    assert list(find_checkpoints(str(tmp_path))) == ["checkpoint-3", "checkpoint-20", "checkpoint-100"]
    (tmp_path / "config.json").write_text("{}")
    assert find_checkpoints(str(tmp_path)) == {tmp_path.name: str(tmp_path)}
    assert find_checkpoints("org/model") == {"model": "org/model"}


@pytest.mark.parametrize("run", [None, "", "results/no/such", "./nothing"])
def test_a_run_that_is_not_there_is_refused(run):
    with pytest.raises(UserError, match="model_name_or_path"):
        find_checkpoints(run)


def test_an_empty_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="checkpoint-<update>"):
        find_checkpoints(str(tmp_path))


def test_a_hub_model_needs_a_place_for_its_generations():
    with pytest.raises(UserError, match="dataset_path"):
        generations_folder(None, "org/model")


def test_a_folder_of_something_else_is_not_replaced(tmp_path):
    check_replaceable(tmp_path / "new")
    (tmp_path / "precious.txt").write_text("")
    with pytest.raises(UserError, match="dataset_path"):
        check_replaceable(tmp_path)


def test_data_and_length_are_the_runs_own_unless_given(tmp_path):
    trained = {"dataset_name": "train.jsonl", "max_eval_samples": 5, "response_length": 9, "temperature": 0.7, "stop_token_ids": [3]}
    (tmp_path / "run_config.json").write_text(json.dumps(trained))
    run = ["--model_name_or_path", str(tmp_path)]
    config = parse_generate_config(run)
    assert (config.dataset_name, config.response_length, config.stop_token_ids) == ("train.jsonl", 9, [3])
    assert (config.temperature, config.kl_temperature, config.max_eval_samples) == (0.01, 0.7, None)
    given = parse_generate_config([*run, "--response_length", "12", "--kl_temperature", "1.0"])
    assert (given.dataset_name, given.response_length, given.kl_temperature) == ("train.jsonl", 12, 1.0)
    (tmp_path / "checkpoint-4").mkdir()
    assert run_settings(str(tmp_path / "checkpoint-4")) == trained
    assert parse_generate_config(["--model_name_or_path", "org/model"]).kl_temperature == 1.0


# -- the scripts --------------------------------------------------------------------------------------------------------------


def run_script(name, *arguments):
    command = [sys.executable, str(ROOT / f"{name}.py"), *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def finish(process, returncode=0):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == returncode, output
    return output


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tiny tensors: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An SFT model, a run of two checkpoints, prompts and a gold function; then both scripts, as a user runs them."""
    folder = tmp_path_factory.mktemp("evaluation")
    rng = np.random.default_rng(0)
    rows = []
    for i in range(12):
        prompt = " ".join(rng.choice(WORDS, 3 + i % 5))
        rows.append({"prompt": f"{prompt}:", "completion": f" {rng.choice(WORDS)}", "letters": str(rng.choice(WORDS))[:2]})
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "gold.py").write_text(GOLD)
    tokenizer = train_tokenizer((row["prompt"] + row["completion"] for row in rows), 300, 64)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64}
    for seed, path in enumerate(("sft", "run/checkpoint-2", "run/checkpoint-10")):
        (folder / path).parent.mkdir(exist_ok=True)
        model = scratch_causal_lm(shape | {"initializer_range": 0.3}, tokenizer, seed)
        save_model(model, tokenizer, folder / path)
    trained = {
        "model_name_or_path": str(folder / "sft"),
        "sft_model_path": None,
        "dataset_name": str(folder / "prompts.jsonl"),
        "eval_split": "train",
        "response_length": 8,
        "stop_token_ids": STOPS,
        "temperature": 0.7,
    }
    (folder / "run" / "run_config.json").write_text(json.dumps(trained))
    common = ["--generator", "hf", "--num_generations", 2, "--kl_samples", 2, "--model_name_or_path"]
    data = ["--dataset_name", folder / "prompts.jsonl", "--eval_split", "train", "--response_length", 8, "--stop_token_ids", *STOPS]
    process = run_script("generate_for_eval", *common, folder / "run")
    with pytest.MonkeyPatch.context() as patch:  # the baseline's meanwhile, in this process
        patch.setattr(sys, "argv", ["generate_for_eval.py", *map(str, [*common, folder / "sft", *data])])
        load_script("generate_for_eval").main()
    finish(process)
    judge = ["--gold_reward_model_path", f"{folder / 'gold.py'}:count", "--baseline_dataset_path", folder / "sft" / "_generations"]
    finish(run_script("load_and_eval", "--model_name_or_path", folder / "run", *judge, "--bootstrap_samples", 300))
    return folder


@pytest.fixture(scope="module")
def results(folder):
    return json.loads((folder / "run" / "_evaluation" / "results.json").read_text())


def logprobs(model, prompt, response, temperature):
    """Of the response's tokens, one sequence at a time and without padding."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double() / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0].tolist()


def count(text, letters):
    return sum(text.count(letter) for letter in letters)


@pytest.mark.parametrize("name", ["checkpoint-2", "checkpoint-10", "sft"])
def test_results_equal_an_independent_recomputation(folder, results, name):
    record = load_from_disk(str(folder / ("sft" if name == "sft" else "run") / "_generations"))
    baseline = load_from_disk(str(folder / "sft" / "_generations"))["sft"][:]
    tokenizer, sft = AutoTokenizer.from_pretrained(folder / "sft"), AutoModelForCausalLM.from_pretrained(folder / "sft")
    temperature = 1.0 if name == "sft" else 0.7  # the run's own; the SFT model has no run_config.json
    policy = AutoModelForCausalLM.from_pretrained(folder / ("sft" if name == "sft" else f"run/{name}"))
    wins, ties, scores, nll, tokens, kls, lengths, ends, ahead, behind, level = [], [], [], 0.0, 0, [], [], [], [], [], []
    for row, theirs in zip(record, baseline, strict=True):
        letters = row["row"]["letters"]
        reference = count(row["row"]["completion"], letters)
        own = [count(response["text"], letters) for response in row[name]["responses"]]
        others = [count(response["text"], letters) for response in theirs["responses"]]
        assert len(own) == 2 and row["reference"] == row["row"]["completion"]
        scores += own
        wins += [score > reference for score in own]
        ties += [score == reference for score in own]
        ahead += [a > b for a, b in product(own, others)]
        behind += [a < b for a, b in product(own, others)]
        level += [a == b for a, b in product(own, others)]
        for response in row[name]["responses"]:
            lengths.append(len(response["ids"]))
            ends.append(response["finished"])
            ended = response["ids"][-1] in STOPS
            assert response["finished"] == ended and (ended or len(response["ids"]) == 8)
            assert response["text"] == tokenizer.decode(response["ids"][: len(response["ids"]) - ended], skip_special_tokens=True)
            values = logprobs(sft, row["prompt_ids"], response["ids"], 1.0)
            nll, tokens = nll - sum(values), tokens + len(values)
        for sample in row[name]["kl_samples"]:
            recorded = logprobs(policy, row["prompt_ids"], sample["ids"], temperature)
            assert recorded == pytest.approx(sample["logprobs"], abs=1e-4)
            kls.append(sum(recorded) - sum(logprobs(sft, row["prompt_ids"], sample["ids"], temperature)))
    found = results["baseline"]["sft"] if name == "sft" else results["checkpoints"][name]
    expected = {
        "win_rate": np.mean(wins),
        "tie_rate": np.mean(ties),
        "score": np.mean(scores),
        "reference_score": np.mean([count(row["row"]["completion"], row["row"]["letters"]) for row in record]),
        "perplexity": math.exp(nll / tokens),
        "kl": np.mean(kls),
        "response_length": np.mean(lengths),
        "eos_rate": np.mean(ends),
    }
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert found["win_rate_ci"][0] <= found["win_rate"] <= found["win_rate_ci"][1]
    assert 0 < found["eos_rate"] < 1
    if name == "sft":
        assert found["kl"] == pytest.approx(0, abs=1e-4) and "head_to_head" not in found
    else:
        assert found["kl"] > 1
        head = found["head_to_head"]
        assert [head["win_rate"], head["tie_rate"], head["lose_rate"]] == pytest.approx([np.mean(ahead), np.mean(level), np.mean(behind)])
        assert head["net"] == pytest.approx(np.mean(ahead) - np.mean(behind))


def test_record_and_results_say_how_they_were_made(folder, results):
    settings = Generations.load(folder / "run" / "_generations").settings
    assert settings["sampling"] == {
        "response_length": 8,
        "temperature": 0.01,
        "top_p": 1.0,
        "top_k": 0,
        "stop_token_ids": STOPS,
        "num_generations": 2,
        "kl_samples": 2,
        "kl_temperature": 0.7,
    }
    assert list(settings["checkpoints"]) == list(results["checkpoints"]) == ["checkpoint-2", "checkpoint-10"]
    assert max(settings["mismatch"].values()) < 1e-4
    assert results["settings"]["generations"] == settings and results["settings"]["sft_model_path"] == str(folder / "sft")
    assert results["prompts"] == 12
    table = (folder / "run" / "_evaluation" / "results.md").read_text()
    assert table.count("\n| ") == 4 and "sft (baseline)" in table
    assert (folder / "run" / "_evaluation" / "gold_against_kl.png").stat().st_size > 10_000


@pytest.mark.parametrize("field, value", [("response_length", 53), ("temperature", 0.7), ("num_generations", 1), ("kl_temperature", 1.0)])
def test_sampling_settings_other_than_recorded_are_refused(folder, field, value):
    arguments = ["--model_name_or_path", str(folder / "run"), f"--{field}", str(value)]
    config = parse_evaluate_config(arguments)
    with pytest.raises(UserError, match=f"{field} {value}"):
        check_recorded(config, Generations.load(folder / "run" / "_generations"), folder)


def test_a_baseline_of_other_prompts_or_another_temperature_is_refused(folder):
    ours, theirs = (Generations.load(folder / run / "_generations") for run in ("run", "sft"))
    check_comparable(ours, theirs)
    with pytest.raises(UserError, match="11 prompts"):
        check_comparable(ours, Generations(theirs.settings, theirs.rows.select(range(11))))
    with pytest.raises(UserError, match=r"temperature is 1\.0, that of the run 0\.01"):
        check_comparable(ours, Generations({"sampling": theirs.settings["sampling"] | {"temperature": 1.0}}, theirs.rows))


def test_the_same_completion_scores_the_same_whatever_the_batch(folder):
    (folder / "jitter.py").write_text("import random\n\ndef score(samples):\n    return [random.random() for _ in samples]\n")
    script = load_script("load_and_eval")
    arguments = ["--model_name_or_path", str(folder / "run"), "--gold_reward_model_path", f"{folder / 'jitter.py'}:score"]
    config = parse_evaluate_config(arguments)
    record = Generations.load(folder / "run" / "_generations")
    judges = script.Judges(config, record, None)
    first, again = (judges.measure(record, "checkpoint-2").scores for _ in range(2))
    assert (first == again).all() and len(np.unique(first)) >= 12


def test_an_engine_with_other_weights_is_noticed(folder):
    script = load_script("generate_for_eval")
    models = [AutoModelForCausalLM.from_pretrained(folder / "run" / name) for name in ("checkpoint-2", "checkpoint-10")]
    generator = HFGenerator(models[0], pad_token_id=0)
    assert script.check_weights(script.GenerateConfig(), generator, models[0], [5, 6, 7, 8]) < 1e-4
    with pytest.raises(RuntimeError, match="max_logprob_mismatch"):
        script.check_weights(script.GenerateConfig(), generator, models[1], [5, 6, 7, 8])


def test_a_prompt_that_does_not_fit_is_refused_with_its_row(folder):
    script = load_script("generate_for_eval")
    model = AutoModelForCausalLM.from_pretrained(folder / "sft")
    with pytest.raises(UserError, match=r"prompt 1 has 60 tokens; with response_length 8 .* 64"):
        script.check_context(model, 68, PromptData(None, [[5] * 3, [5] * 60], dropped=0))


def test_dry_runs_load_no_model(folder, monkeypatch, capsys):
    for name in ("generate_for_eval", "load_and_eval"):
        script = load_script(name)
        monkeypatch.setattr(script, "load_tokenizer", None)
        gold = ["--gold_reward_model_path", f"{folder / 'gold.py'}:count"] if name == "load_and_eval" else []
        monkeypatch.setattr(sys, "argv", [name, "--model_name_or_path", str(folder / "run"), "--dry_run", *gold])
        script.main()
        assert "12" in (said := capsys.readouterr().out) and "checkpoint-2, checkpoint-10" in said


def test_what_is_not_there_is_refused_before_any_model_is_loaded(folder, monkeypatch):
    script = load_script("load_and_eval")
    run = ["--model_name_or_path", str(folder / "run")]
    for arguments, field in (
        ([], "gold_reward_model_path"),
        (["--gold_reward_model_path", "no/such/model"], "gold_reward_model_path"),
        (["--gold_reward_model_path", f"{folder / 'gold.py'}:count", "--sft_model_path", "./no/such"], "sft_model_path"),
        (["--gold_reward_model_path", f"{folder / 'gold.py'}:count", "--baseline_dataset_path", str(folder)], "generations.json"),
    ):
        monkeypatch.setattr(sys, "argv", ["load_and_eval.py", *run, *arguments])
        with pytest.raises(UserError, match=field):
            script.main()
