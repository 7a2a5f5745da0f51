"""Checkpoints that a run goes on from exactly: whole or not there, checked before they are used, the newest ones kept.

A checkpoint is a model folder with a folder `trainer_state` in it, of which a `manifest.json` lists every file with its size and
checksum. It is made at the end of an update, and holds what the next one needs: trained weights, optimizer, schedule, random states of all
ranks, the algorithm's own state, batches that were sampled and not yet trained, and how long the run's logs were.
"""

import json
import os
import random
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from async_rlhf import distributed
from async_rlhf.config import RLConfig, UserError, require
from async_rlhf.runs import CHECKPOINT, run_settings

STATE, MANIFEST, PROGRESS, TENSORS = "trainer_state", "manifest.json", "progress.json", "state.pt"
RESUMABLE = 2  # checkpoints that keep their state: the newest, and the one before it in case that one is damaged
LOGS = ("metrics.jsonl", "eval.jsonl", "rollouts.jsonl", "completions/*.jsonl")
FREE = frozenset(
    "resume_from_checkpoint overwrite_output_dir output_dir reference_url output_global_parent_dir report_to project run_name wandb_run_id "
    "push_to_hub hub_model_id generate_config evaluate_config vllm_device vllm_gpu_memory_utilization vllm_cpu_kvcache_gib "
    "vllm_enforce_eager generator_timeout engine_timeout max_engine_restarts wait_report snapshot_dir save_steps save_total_limit "
    "dry_run".split()
)


@dataclass
class Progress:
    """Where a run stands after `updates` updates. `logs` are the sizes of its log files in bytes; `held` and `evaluated` those of
    `GenerationPipeline.hold`; `steps_at` the optimizer steps in each snapshot."""

    updates: int
    steps_at: dict[int, int]
    evaluated: int = -1
    last_record: dict[str, float] = field(default_factory=dict)
    last_evaluation: dict[str, float] = field(default_factory=dict)
    logs: dict[str, int] = field(default_factory=dict)


# -- writing ----------------------------------------------------------------------------------------------------------------


@contextmanager
def new_folder(folder: Path, save_total_limit: int | None = None) -> Iterator[Path]:
    """A folder for all ranks to fill, which takes its name when every file of it is on disk. Then older checkpoints beyond the limit
    go, and the state of all but the newest `RESUMABLE`. Where filling it fails, nothing is left of it."""
    temporary, main, problem = folder.with_name(f".{folder.name}.part"), distributed.is_main(), None
    if main:
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            (temporary / STATE).mkdir(parents=True)
        except OSError as error:
            problem = error
    if problem := distributed.broadcast(problem):  # on every rank: none waits for a folder that will not be
        raise problem
    try:
        yield temporary
        distributed.barrier()
        if main:
            _write_manifest(temporary)
            shutil.rmtree(folder, ignore_errors=True)  # of a run that went on from before it
            temporary.rename(folder)
            _sync(folder.parent)
            _drop_old(folder.parent, save_total_limit)
    except BaseException:
        if main:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    distributed.barrier()


def save_state(folder: Path, progress: Progress, state: Mapping[str, Any], output: Path) -> None:
    """Write what the main process knows. `state` holds tensors, numbers, strings, and lists and dicts of them."""
    logs = [path for pattern in LOGS for path in output.glob(pattern)]
    for path in logs:
        _sync(path)
    progress.logs = {str(path.relative_to(output)): path.stat().st_size for path in logs}
    (folder / STATE / PROGRESS).write_text(json.dumps(asdict(progress)) + "\n", encoding="utf-8")
    torch.save(dict(state), folder / STATE / TENSORS)


def random_states() -> dict[str, Any]:
    """This rank's random states, as what `torch.load` takes with `weights_only`."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    version, words, second = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [kind, keys.tolist(), position, has_gauss, gauss],
        "python": [version, list(words), second],
    }


def restore_random_states(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    if states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])
    kind, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    version, words, second = states["python"]
    random.setstate((version, tuple(words), second))


def _write_manifest(folder: Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "README.md")  # the card may be written anew
    manifest = {str(path.relative_to(folder)): _fingerprint(path, sync=True) for path in files}
    (folder / STATE / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    for path in (folder / STATE / MANIFEST, *(path for path in folder.rglob("*") if path.is_dir()), folder):
        _sync(path)


def _fingerprint(path: Path, sync: bool = False) -> list[int]:
    """Size and CRC-32."""
    size, checksum = 0, 0
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        while block := file.read(1 << 24):
            size, checksum = size + len(block), zlib.crc32(block, checksum)
    return [size, checksum]


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _drop_old(output: Path, save_total_limit: int | None) -> None:
    newest_first = checkpoints(output)
    for path in newest_first[save_total_limit:] if save_total_limit else []:
        shutil.rmtree(path)
    for path in newest_first[RESUMABLE:save_total_limit]:
        shutil.rmtree(path / STATE, ignore_errors=True)


# -- reading ------------------------------------------------------------------------------------------------------------------


def checkpoints(output: Path) -> list[Path]:
    """The checkpoints of a run, the newest first."""
    found = {int(match[1]): path for path in output.glob("checkpoint-*") if (match := CHECKPOINT.fullmatch(path.name))}
    return [path for _, path in sorted(found.items(), reverse=True)]


def find_checkpoint(config: RLConfig, facts: Mapping[str, Any]) -> Path | None:
    """The checkpoint to go on from, after every file of it was checked; None: from the start. `latest` passes over a damaged one, and
    says so. `facts` of this run beside its settings must be those of the run there too.

    Raises:
        UserError: the checkpoint named is of another folder, has no state or is damaged; or the run there had other settings.
    """
    wanted, output = config.resume_from_checkpoint, Path(config.output_dir)
    if wanted is None:
        return None
    if wanted != "latest":
        require(not config.overwrite_output_dir, "resume_from_checkpoint with a path and overwrite_output_dir exclude each other")
        path = Path(wanted).expanduser()
        require(path.is_dir(), f"resume_from_checkpoint {wanted!r}: no such folder")
        inside = path.resolve().parent == output.resolve()
        require(inside, f"resume_from_checkpoint {wanted!r}: a run goes on in its own folder: set output_dir to {str(path.parent)!r}")
        reason = damage(path)
        require(not reason, f"resume_from_checkpoint {wanted!r}: {reason}; `latest` takes the newest whole one")
        _check_same_run(config, facts)
        return path
    candidates = checkpoints(output)
    if (output / "run_config.json").exists() and (candidates or not config.overwrite_output_dir):
        _check_same_run(config, facts)
    for path in candidates:
        reason = damage(path)
        if not reason:
            return path
        print(f"warning: {path} is passed over: {reason}")
    require(not candidates, f"resume_from_checkpoint latest: none of the {len(candidates)} checkpoints in {str(output)!r} can be resumed")
    print(f"no checkpoint in {output} yet: the run starts from the beginning")
    return None


def damage(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be gone on from; None if it can."""
    try:
        manifest = json.loads((checkpoint / STATE / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"it has no {STATE}: it is a model to evaluate, not to go on from"
    except ValueError:
        return f"its {MANIFEST} is damaged"
    for name, expected in manifest.items():
        if not (checkpoint / name).is_file():
            return f"its file {name} is missing"
        if _fingerprint(checkpoint / name) != expected:
            return f"its file {name} is damaged"
    return None


def _check_same_run(config: RLConfig, facts: Mapping[str, Any]) -> None:
    record, mine = run_settings(config.output_dir), asdict(config) | facts
    mine["sft_model_path"] = config.sft_model_path or record.get("sft_model_path")
    changed = [
        name
        for name, value in record.items()
        if name in mine and name not in FREE and json.loads(json.dumps(mine[name], default=str)) != value
    ]
    listed = ", ".join(f"{name} {record[name]!r} → {mine[name]!r}" for name in changed)
    if changed:
        raise UserError(f"resume_from_checkpoint: the run in {config.output_dir!r} had other settings: {listed}")


def load_progress(checkpoint: Path) -> Progress:
    record = json.loads((checkpoint / STATE / PROGRESS).read_text(encoding="utf-8"))
    record["steps_at"] = {int(version): steps for version, steps in record["steps_at"].items()}
    return Progress(**record)


def load_state(checkpoint: Path) -> dict[str, Any]:
    return torch.load(checkpoint / STATE / TENSORS, map_location="cpu", weights_only=True)


def rewind(output: Path, progress: Progress) -> None:
    """Bring the run's folder back to where it stood: logs are cut, and what was begun or made since is deleted.

    Raises:
        UserError: a log is not there, or shorter than it was.
    """
    for name, size in progress.logs.items():
        whole = (output / name).is_file() and (output / name).stat().st_size >= size
        require(whole, f"resume_from_checkpoint: {output / name} is not there or shorter than when the checkpoint was made")
    for path in [path for pattern in LOGS for path in output.glob(pattern)]:
        size = progress.logs.get(str(path.relative_to(output)), 0)
        os.truncate(path, size) if size else path.unlink()
    later = [path for path in checkpoints(output) if int(CHECKPOINT.fullmatch(path.name)[1]) > progress.updates]
    for path in [*later, *output.glob(".checkpoint-*.part")]:
        shutil.rmtree(path)
