"""What becomes of a run in which something dies: every fault at every moment, with the real vLLM engine.

    python benchmarks/kill_matrix.py                                                     # all of it: about 36 × 1.5 minutes on 2 cores
    python benchmarks/kill_matrix.py --faults "EngineCore SIGKILL" Ctrl-C --moments generating saving

Each cell is a run of its own, eight updates of Online DPO on the docstrings that save every second one. When it is past its first
checkpoint and reaches the moment, it says so in a file, and is hit. Prints a table: what became of it, the seconds until then, processes
and snapshots left behind (0), updates to do again when it is resumed (at most `save_steps`), and what the user reads.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rlhf.config import parse, require, run_script, setting
from async_rlhf.reaper import marked

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = {"EngineCore": "VLLM::EngineCore", "Worker": "VLLM::Worker"}
FROM_OUTSIDE = ("EngineCore SIGKILL", "Worker SIGKILL", "EngineCore SIGSTOP", "trainer SIGKILL", "a rank SIGKILL", "Ctrl-C")
FAULTS = (*FROM_OUTSIDE, "generator raises", "reward raises", "trainer raises")
MOMENTS = ("generating", "loading", "saving", "waiting")
UPDATES, SAVE_STEPS, SAVED = 8, 2, 2
ENGINE_TIMEOUT, HOLD_SECONDS, CELL_SECONDS = 10, 4.0, 600
MARK = "KILL_MATRIX"


@dataclass
class MatrixConfig:
    faults: list[str] = setting(list(FAULTS), "Which ones.")
    moments: list[str] = setting(list(MOMENTS), "Which ones.")
    output_dir: str = setting("results/kill_matrix", "Folder of all runs; results.jsonl there has one line a cell.")


@dataclass
class Cell:
    fault: str
    moment: str
    outcome: str
    seconds: float
    orphans: int
    snapshots: int
    redo: int
    restarts: int
    says: str

    def row(self) -> str:
        left = f"{self.orphans} | {self.snapshots}"
        return (
            f"| {self.fault} | {self.moment} | {self.outcome} | {self.seconds:.0f} | {left} | {self.redo} | {self.restarts} | {self.says} |"
        )


COLUMNS = ("fault", "while", "outcome", "seconds", "orphans", "snapshots left", "updates to redo", "restarts", "it says")


def main() -> None:
    config = parse(MatrixConfig)
    for name, known in (("faults", FAULTS), ("moments", MOMENTS)):
        unknown = sorted(set(getattr(config, name)) - set(known))
        require(not unknown, f"{name} {', '.join(unknown)}: some of {', '.join(known)}")
    output = Path(config.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
    for fault in config.faults:
        for moment in config.moments:
            cell = hit(fault, moment, output / f"{fault} {moment}".replace(" ", "_"))
            with (output / "results.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(vars(cell)) + "\n")
            print(cell.row(), flush=True)


# -- outside of the run -----------------------------------------------------------------------------------------------------


def hit(fault: str, moment: str, folder: Path) -> Cell:
    """One cell. Nothing of the run is left when it returns, whatever it found."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "snapshots").mkdir(parents=True)
    mark = uuid.uuid4().hex
    # A process title would wipe out the mark; PYTHONPATH is for the engine, which loads SlowLoader
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {MARK: mark, "SPT_NOENV": "1", "TQDM_DISABLE": "1", "PYTHONPATH": path}
    command = [sys.executable, __file__, "--inside", fault, moment, str(folder)]
    if fault == "a rank SIGKILL":
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    run, log = folder / "run", (folder / "log.txt").open("w+", encoding="utf-8")
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
    try:
        told = wait_until(lambda: (folder / "moment").exists() or process.poll() is not None, CELL_SECONDS)
        if not told or process.poll() is not None:
            return Cell(fault, moment, "**never came there**", 0.0, 0, 0, 0, 0, f"see {folder / 'log.txt'}")
        lines = len(metrics(run))
        started = time.monotonic()
        if fault in FROM_OUTSIDE:
            strike(fault, process.pid, mark)

        def settled() -> bool:
            done = metrics(run)
            return process.poll() is not None or bool(done and done[-1]["generator/restarts"])

        wait_until(settled, CELL_SECONDS)
        seconds = time.monotonic() - started  # until it has restarted its engine or is over; a run that needs no restart just goes on
        wait_until(lambda: process.poll() is not None, CELL_SECONDS)
        code = process.poll()
        wait_until(lambda: not marked(mark, MARK), 20.0)
        orphans, done = len(marked(mark, MARK)), metrics(run)
        log.seek(0)
        said = log.read().splitlines()
        if code is None:
            outcome = "**hangs**"
        elif code == 0:
            outcome = "goes on" if len(done) == UPDATES else f"**ends early, {len(done)} of {UPDATES} updates**"
        else:
            outcome = f"ends with {code}"
        return Cell(
            fault,
            moment,
            outcome,
            seconds,
            orphans,
            len(list((folder / "snapshots").iterdir())),
            max(lines, len(done)) - newest_checkpoint(run),
            int(done[-1]["generator/restarts"]) if done else 0,
            what_it_says(said, code),
        )
    finally:
        for pid in marked(mark, MARK):
            kill(pid, signal.SIGKILL)
        process.wait()
        log.close()


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def strike(fault: str, pid: int, mark: str) -> None:
    who, _, name = fault.rpartition(" ")
    if fault == "Ctrl-C":
        os.killpg(pid, signal.SIGINT)
    elif who == "trainer":
        kill(pid, signal.SIGKILL)
    elif who == "a rank":
        for other in marked(mark, MARK):
            if b"RANK=1" in read(other, "environ") and b"--inside" in read(other, "cmdline"):
                kill(other, signal.SIGKILL)
    else:
        for other in marked(mark, MARK):
            if read(other, "cmdline")[0].startswith(PROCESSES[who].encode()):
                kill(other, getattr(signal, name))


def kill(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def read(pid: int, name: str) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().split(b"\0")
    except OSError:
        return [b""]


def metrics(run: Path) -> list[dict[str, Any]]:
    try:
        text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.split("\n")[:-1]]


def newest_checkpoint(run: Path) -> int:
    return max((int(path.name.split("-")[1]) for path in run.glob("checkpoint-*")), default=0)


def what_it_says(lines: list[str], code: int | None) -> str:
    """The warning of a restart, or the error that ended it."""
    warnings = [match[0] for line in lines if (match := re.search("warning: .*", line))]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Failure|Interrupt|Exception)\b", line)]
    said = warnings if code == 0 else errors
    return said[-1][:200].replace("|", "/") if said else ""


# -- in the run -----------------------------------------------------------------------------------------------------------------


def run_inside(fault: str, moment: str, folder: Path) -> None:
    """A run that tells of the moment, once, and where the fault is one of its own code's, raises it."""
    from async_rlhf import distributed, pipeline, trainer, vllm_utils
    from online_dpo import OnlineDPO, OnlineDPOConfig

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in a shell's background has it ignored
    raised, told = threading.Event(), threading.Event()
    ours = fault not in FROM_OUTSIDE

    def reached(name: str, hold: float = 0.0) -> None:
        if name == moment and not told.is_set() and distributed.is_main() and (folder / "run" / f"checkpoint-{SAVED}").exists():
            told.set()
            tell(folder)
            if ours:
                raised.set()
            time.sleep(hold)

    def fail_if(who: str) -> None:
        if raised.is_set() and fault == f"{who} raises":
            raise RuntimeError(f"the {who} raises")

    def around(owner: Any, name: str, before: Callable[[], None]) -> None:
        wrapped = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            before()
            return wrapped(*args, **options)

        setattr(owner, name, call)

    class Generator(vllm_utils.VLLMGenerator):
        worker_extension = f"benchmarks.{Path(__file__).stem}.{SlowLoader.__name__}"

        def load_weights(self, snapshot):
            if ours:
                reached("loading")
            fail_if("generator")
            super().load_weights(snapshot)

        def generate(self, prompts, sampling, finished=None):
            fail_if("generator")
            return super().generate(prompts, sampling, finished)

        async def _sample(self, *args):
            rollout = await super()._sample(*args)
            reached("generating")
            fail_if("generator")
            return rollout

    def before_training() -> None:
        waits = wait_until(lambda: "waiting for weights" in current.doing(), 30.0) if current and moment == "waiting" else False
        if waits:
            reached("waiting", HOLD_SECONDS)
        fail_if("trainer")

    def before_saving() -> None:
        reached("saving", HOLD_SECONDS)
        fail_if("trainer")

    vllm_utils.VLLMGenerator = Generator
    around(trainer.Trainer, "_train", before_training)
    around(trainer, "save_state", before_saving)
    around(trainer.Trainer, "_reward", lambda: fail_if("reward"))
    os.environ["KILL_MATRIX_FOLDER"] = "" if ours or moment != "loading" else str(folder)
    os.environ["KILL_MATRIX_RUN"] = str(folder / "run" / f"checkpoint-{SAVED}")
    arguments = {
        "output_dir": folder / "run",
        "snapshot_dir": folder / "snapshots",
        "reward_model_path": "async_rlhf.rewards.docstrings:gold",
        "total_episodes": 64 * UPDATES,
        "gradient_accumulation_steps": 1,
        "per_device_train_batch_size": 64 // distributed.launched_processes(),
        "save_steps": SAVE_STEPS,
        "response_length": 64,
        "engine_timeout": ENGINE_TIMEOUT,
        "report_to": "none",
    }
    chosen = ["--config", str(ROOT / "configs" / "onlinedpo_tiny.yml"), *(f"--{name}={value}" for name, value in arguments.items())]
    config = parse(OnlineDPOConfig, chosen)
    config.model_name_or_path, config.eval_steps = str(ROOT / config.model_name_or_path), None
    current: pipeline.GenerationPipeline | None = None
    training = trainer.Trainer(config, OnlineDPO(config))
    opened = training._open_pipeline

    def open_pipeline() -> pipeline.GenerationPipeline:
        nonlocal current
        current = opened()
        return current

    training._open_pipeline = open_pipeline
    training.run()


def tell(folder: Path) -> None:
    (folder / "moment.part").touch()
    (folder / "moment.part").rename(folder / "moment")


class SlowLoader:
    """The engine's `WeightLoader`, in its process, which takes `HOLD_SECONDS` longer for one snapshot and tells of it."""

    def load_snapshot(self, path: str) -> None:
        from async_rlhf.vllm_utils import WeightLoader

        folder, saved = Path(os.environ["KILL_MATRIX_FOLDER"]), Path(os.environ["KILL_MATRIX_RUN"])
        if folder.name and saved.exists() and not (folder / "moment").exists():
            tell(folder)
            time.sleep(HOLD_SECONDS)
        WeightLoader.load_snapshot(self, path)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        run_script(lambda: run_inside(sys.argv[2], sys.argv[3], Path(sys.argv[4])))
    else:
        run_script(main)
