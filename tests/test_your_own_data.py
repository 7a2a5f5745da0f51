"""docs/your_own_data.md as its reader goes through it: its files written, its commands run one after the other, for real."""

import json
import os
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from test_docs import RUN_FOR_REAL, Workplace, commands_of, files_of, run_as_documented, split_page


@pytest.fixture(scope="module")
def reader(tmp_path_factory) -> Path:
    """The folder in which the reader has done everything. Only what needs several GPUs was a dry run."""
    folder, files = tmp_path_factory.mktemp("own_data"), files_of(RUN_FOR_REAL)
    affinity, threads = os.sched_getaffinity(0), torch.get_num_threads()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    for command in commands_of(RUN_FOR_REAL):
        with pytest.MonkeyPatch.context() as patch:
            place = Workplace(folder, patch, files, dry=command.text.startswith("accelerate"))
            run_as_documented(place, command)
        os.sched_setaffinity(0, affinity)
        torch.set_num_threads(threads)
    return folder


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_page_ends_in_a_table_with_the_sft_policy_as_baseline(reader):
    folder = reader / "results" / "my_dpo" / "_evaluation"
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert list(results["baseline"]) == ["sft"] and list(results["checkpoints"]) == [f"checkpoint-{n}" for n in (2, 4, 6, 8)]
    assert results["prompts"] == 16
    for checkpoint in results["checkpoints"].values():
        assert checkpoint["reference_score"] == 1.0 and checkpoint["win_rate"] == 0.0
        assert checkpoint["score"] == checkpoint["tie_rate"]
    table = (folder / "results.md").read_text(encoding="utf-8")
    assert table.count("\n| checkpoint-") == 4 and "| sft (baseline) |" in table


def test_what_was_said_was_asked_in_the_readers_template(reader):
    asked = [row["question"] for row in lines(reader / "questions.jsonl")[48:]]
    said = [sample for sample in lines(reader / "results/my_dpo/_evaluation/samples.jsonl") if sample["checkpoint"] == "checkpoint-8"]
    assert [sample["prompt"] for sample in said] == [f"Question: {question}\nAnswer:" for question in asked]
    assert all(sample["reference"][0] == " " for sample in said)


def test_the_reward_model_and_the_function_both_gave_a_score(reader):
    for run in ("my_dpo", "my_dpo_function"):
        scores = [update["objective/score"] for update in lines(reader / "results" / run / "metrics.jsonl")]
        assert len(scores) == 8
    assert all(0 <= score <= 1 for score in scores)
    assert not (reader / "results" / "my_short").exists()  # refused before anything was written


def test_the_rows_shown_have_the_columns_of_the_files(reader):
    blocks, _ = split_page((ROOT / RUN_FOR_REAL).read_text(encoding="utf-8"))
    shown = [json.loads(line) for block in blocks for line in block.lines if line.startswith("{")]
    assert [list(row) for row in shown] == [list(lines(reader / name)[0]) for name in ("questions.jsonl", "comparisons.jsonl")]
