"""A run's folder: where it is placed under Slurm and elsewhere, ids that no two runs share, links, cards, pushing."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.utils import filter_repo_objects
from tiny_run import settings, train

import async_rlhf.model_card
from async_rlhf.config import RunConfig, UserError
from async_rlhf.runs import claim_folder, link_output, place_run, run_settings
from async_rlhf.trainer import Trainer
from online_dpo import OnlineDPO


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_JOB_ID", "WANDB_RUN_ID", "ASYNC_RLHF_OUTPUT_LINK"):
        monkeypatch.delenv(name, raising=False)


def placed(**fields) -> RunConfig:
    config = RunConfig(**fields)
    place_run(config)
    return config


def test_output_goes_under_the_global_parent():
    assert placed(output_dir="dpo", output_global_parent_dir="results").output_dir == "results/dpo"
    assert placed(output_dir="results/dpo").output_dir == "results/dpo"
    with pytest.raises(UserError, match="output_dir '/tmp/dpo' is absolute"):
        RunConfig(output_dir="/tmp/dpo", output_global_parent_dir="results")


@pytest.mark.parametrize(
    ("fields", "output", "run_id"),
    [
        ({"output_dir": "dpo", "output_global_parent_dir": "all/results"}, "all/results/42/dpo", "results_42_dpo"),
        ({"output_dir": "results/dpo"}, "results/42/dpo", "results_42_dpo"),
        ({"output_dir": "a/b c", "output_global_parent_dir": "results"}, "results/42/a/b c", "results_42_a_b_c"),
    ],
)
def test_slurm_names_parent_job_and_output(fields, output, run_id, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    config = placed(wandb_run_id="slurm", **fields)
    assert (config.output_dir, config.wandb_run_id, config.run_name) == (output, run_id, Path(output).name)


def test_without_a_parent_the_working_folder_names_it(monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    assert placed(output_dir="dpo", wandb_run_id="slurm").wandb_run_id == f"{tmp_path.name}_42_dpo"


def test_slurm_outside_a_job_is_refused():
    with pytest.raises(UserError, match="SLURM_JOB_ID is not set"):
        placed(wandb_run_id="slurm")


def test_no_two_runs_share_an_id_by_default(monkeypatch):
    first, second = placed(output_dir="results/dpo"), placed(output_dir="results/dpo")
    assert first.wandb_run_id != second.wandb_run_id and first.wandb_run_id.startswith("dpo-")
    assert placed(wandb_run_id="mine").wandb_run_id == "mine"
    monkeypatch.setenv("WANDB_RUN_ID", "theirs")
    assert placed().wandb_run_id == "theirs"


def test_an_unknown_tracker_is_refused():
    with pytest.raises(UserError, match="report_to 'wandbb': one of none, tensorboard, trackio, wandb"):
        RunConfig(report_to=["wandbb"])


def test_links_lead_to_the_run_and_never_replace_a_folder(tmp_path, monkeypatch, capsys):
    for name in ("a", "b"):
        Path(name).mkdir()
        monkeypatch.setenv("ASYNC_RLHF_OUTPUT_LINK", str(tmp_path / f"of_{name}"))
        link_output(Path(name))
    assert Path("output_dir").resolve() == tmp_path / "b"  # the later one
    assert Path("of_a").resolve() == tmp_path / "a" and Path("of_b").resolve() == tmp_path / "b"
    Path("output_dir").unlink()
    Path("output_dir").mkdir()
    link_output(Path("a"))
    assert Path("output_dir").is_dir() and not Path("output_dir").is_symlink()
    assert "'output_dir' exists and is no link" in capsys.readouterr().out


def test_links_made_at_once_are_whole(tmp_path):
    for i in range(20):
        Path(f"run{i}").mkdir()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: link_output(Path(f"run{i}")), range(20)))
    assert Path("output_dir").resolve().name.startswith("run")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("output_dir")] == ["output_dir"]


def test_only_a_runs_own_files_are_replaced_and_only_when_asked(tmp_path):
    folder = tmp_path / "run"
    (folder / "checkpoint-3").mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds another run"):
        claim_folder(folder, overwrite=False)
    claim_folder(folder, overwrite=True)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


class RecordingHub:
    """Stands in for `HfApi`: what would be sent."""

    calls: list = []  # noqa: RUF012

    def create_repo(self, name, exist_ok):
        self.calls.append(("create", name, exist_ok))
        return type("Repository", (str,), {"repo_id": f"someone/{name}"})(f"hub/someone/{name}")

    def upload_folder(self, repo_id, folder_path, commit_message, ignore_patterns):
        files = [path.relative_to(folder_path).as_posix() for path in Path(folder_path).rglob("*") if path.is_file()]
        sent = sorted(filter_repo_objects(files, ignore_patterns=ignore_patterns))
        self.calls.append(("upload", repo_id, Path(folder_path).name, sent))


def test_a_checkpoint_has_a_card_and_is_pushed_when_asked(model_folder, prompts_file, reward_file, tmp_path, monkeypatch):
    monkeypatch.setattr(async_rlhf.model_card, "HfApi", RecordingHub)
    monkeypatch.setattr(async_rlhf.model_card, "get_token", lambda: "token")
    config = settings(
        model_folder, prompts_file, reward_file, tmp_path / "results" / "dpo", push_to_hub=True, max_staleness=1, eval_steps=4,
        eval_split="train[:5]",
    )  # fmt: skip
    place_run(config)
    metrics, _ = train(config)
    card = ModelCard.load(tmp_path / "results" / "dpo" / "checkpoint-4" / "README.md")
    assert card.data.library_name == "transformers" and "onlinedpo" in card.data.tags
    text = card.text
    assert (
        "| algorithm | OnlineDPO, loss_type sigmoid |" in text
        and "| reward | " in text
        and f"| prompts | {prompts_file}, split train |" in text
    )
    assert "max_staleness 1 (asynchronous, sampled 1 batches behind), weight_update exact" in text
    assert (
        f"| objective/score | {metrics[-1]['objective/score']:.4g} |" in text and "| eval/version | 4 |" in text
    )  # the last checkpoint's own evaluation
    create, upload = RecordingHub.calls
    assert create == ("create", "dpo", True)
    assert upload[:3] == ("upload", "someone/dpo", "checkpoint-4")
    model = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert upload[3] == ["README.md", *model]  # and nothing of what a run goes on from
    record = run_settings(str(tmp_path / "results" / "dpo" / "checkpoint-4"))
    assert record["algorithm"] == "OnlineDPO" and record["completions_per_update"] == 16 and record["sft_model_path"] == str(model_folder)
    assert json.loads((tmp_path / "results" / "dpo" / "run_config.json").read_text())["wandb_run_id"] == config.wandb_run_id


def test_pushing_without_a_token_is_refused_before_the_run(model_folder, prompts_file, reward_file, tmp_path, monkeypatch):
    monkeypatch.setattr(async_rlhf.model_card, "get_token", lambda: None)
    config = settings(model_folder, prompts_file, reward_file, tmp_path / "run", push_to_hub=True)
    with pytest.raises(UserError, match="push_to_hub: no Hugging Face token"):
        Trainer(config, OnlineDPO(config))
    assert not (tmp_path / "run").exists()
