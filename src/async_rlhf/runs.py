"""A training run's folder: where it stands, its record `run_config.json`, its checkpoints, and the links that lead to it."""

import json
import os
import re
import shutil
import uuid
from pathlib import Path

from async_rlhf.config import RunConfig, require
from async_rlhf.docstrings import fingerprint
from async_rlhf.models import check_model_path

RUN_FILES = (
    "run_config.json",
    "metrics.jsonl",
    "eval.jsonl",
    "rollouts.jsonl",
    "completions",
    "checkpoint-*",
    ".checkpoint-*.part",
    "_generations",
    "_evaluation",
)
CHECKPOINT = re.compile(r"checkpoint-(\d+)")
LINK = "output_dir"
LINK_VARIABLE = "ASYNC_RLHF_OUTPUT_LINK"  # where a wrapper wants a link of its own, so that it follows its own run


def place_run(config: RunConfig) -> None:
    """Put `output_dir` where the settings want it, and settle the run's id in the trackers. Once, right after parsing.

    Raises:
        UserError: `wandb_run_id: slurm` outside a Slurm job.
    """
    given = Path(config.output_dir).expanduser()
    parent = Path(config.output_global_parent_dir).expanduser() if config.output_global_parent_dir else given.parent
    name = given if config.output_global_parent_dir else Path(given.name)
    if config.wandb_run_id == "slurm":
        job = os.environ.get("SLURM_JOB_ID")
        require(job, "wandb_run_id: slurm names a run after its Slurm job, and SLURM_JOB_ID is not set: leave it out, or give an id")
        config.wandb_run_id = _id(f"{parent.resolve().name}_{job}_{name}")
        parent = parent / job
    elif not config.wandb_run_id:
        config.wandb_run_id = os.environ.get("WANDB_RUN_ID") or _id(f"{name}-{uuid.uuid4().hex[:8]}")
    config.output_dir = str(parent / name)
    config.run_name = config.run_name or Path(config.output_dir).name


def _id(text: str) -> str:
    """wandb takes no / \\ # ? % : in an id."""
    return re.sub(r"[^\w.-]+", "_", text)


def claim_folder(output: Path, overwrite: bool) -> None:
    """Make the folder of a new run. Only an earlier run's own files are ever deleted, and only when asked.

    Raises:
        UserError: another run is there, and `overwrite` does not allow to replace it.
    """
    earlier = [path for pattern in RUN_FILES for path in output.glob(pattern)]
    require(overwrite or not earlier, f"output_dir {str(output)!r} holds another run: name a new folder, or set overwrite_output_dir")
    for path in earlier:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    output.mkdir(parents=True, exist_ok=True)


def record_run(output: Path, algorithm: str, settings: dict) -> None:
    """Write run_config.json: what the evaluation, and whoever finds the folder later, needs to know of the run."""
    record = {"algorithm": algorithm, **settings}
    if settings.get("dataset_name") == "docstrings":
        record["docstrings_fingerprint"] = fingerprint()
    output.mkdir(parents=True, exist_ok=True)
    new = output / ".run_config.json"
    new.write_text(json.dumps(record, indent=2, default=str) + "\n", encoding="utf-8")
    new.replace(output / "run_config.json")


def link_output(output: Path) -> None:
    """Point the link `output_dir` in the working folder to a run that has ended well, and a wrapper's own link too.

    Links are replaced in one step, so that two runs in one folder leave a whole one: that of the later to end.
    """
    for link in {Path(LINK), Path(os.environ.get(LINK_VARIABLE, LINK))}:
        if link.exists() and not link.is_symlink():
            print(f"no link to the results: {str(link)!r} exists and is no link")
            continue
        new = link.with_name(f"{link.name}.{uuid.uuid4().hex[:8]}")
        new.symlink_to(output.resolve())
        new.replace(link)


def find_checkpoints(run: str | None) -> dict[str, str]:
    """Name and path of every checkpoint of a run, in the order of training; a model (folder or hub name) is its own only one.

    Raises:
        UserError: neither a model nor a folder that holds `checkpoint-<update>` models.
    """
    folder = Path(run or "").expanduser()
    if not run or not folder.is_dir() or (folder / "config.json").exists():
        check_model_path(run, "model_name_or_path")
        return {folder.resolve().name: run}
    found = {int(match[1]): path for path in folder.iterdir() if (match := CHECKPOINT.fullmatch(path.name))}
    whole = {path.name: str(path) for _, path in sorted(found.items()) if (path / "config.json").exists()}
    require(whole, f"model_name_or_path {run!r}: neither a config.json nor a checkpoint-<update> folder with one is in it")
    return whole


def run_folder(run: str | None) -> Path | None:
    """The folder with the `run_config.json` of the run, or of the run that this checkpoint belongs to; None where there is none."""
    folder = Path(run or "").expanduser()
    candidates = (folder, folder.parent) if CHECKPOINT.fullmatch(folder.name) else (folder,)
    return next((path for path in candidates if run and (path / "run_config.json").is_file()), None)


def run_settings(run: str | None) -> dict:
    """What `run_config.json` says of the run; empty where there is none."""
    folder = run_folder(run)
    return json.loads((folder / "run_config.json").read_text(encoding="utf-8")) if folder else {}
