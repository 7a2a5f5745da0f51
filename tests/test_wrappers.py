"""The shell wrappers, for real on the tiny config: in a shell and under a stub of Slurm; two at once; exit codes."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

WRAPPERS = ("train.sh", "generate_and_eval.sh", "train_generate_and_eval.sh")

# Slurm keeps a copy of the script elsewhere and runs it in the folder of submission; a step gets SLURM_STEP_ID.
SBATCH = """#!/usr/bin/env bash
set -euo pipefail
while [[ $1 == -* ]]; do shift; done
spool=$(mktemp -d) && cp "$1" "$spool/slurm_script" && shift
export SLURM_JOB_ID=4711 SLURM_SUBMIT_DIR=$PWD SLURM_CPUS_PER_TASK=2
exec bash "$spool/slurm_script" "$@"
"""
SRUN = """#!/usr/bin/env bash
echo "srun $*" >> "$STUB_LOG"
while [[ $1 == --* ]]; do shift; done
SLURM_STEP_ID=0 exec "$@"
"""


@pytest.fixture
def folder(tmp_path):
    """A working folder as a fresh clone has it, with a reward model, and Slurm's commands on the PATH."""
    for path in [*ROOT.glob("*.py"), *ROOT.glob("*.sh"), ROOT / "configs", ROOT / "checkpoints"]:
        (tmp_path / path.name).symlink_to(path)
    for name, text in {"sbatch": SBATCH, "srun": SRUN}.items():
        stub = tmp_path / "bin" / name
        stub.parent.mkdir(exist_ok=True)
        stub.write_text(text)
        stub.chmod(0o755)
    return tmp_path


def environment(folder: Path, slurm: bool = False) -> dict:
    path = [str(Path(sys.executable).parent), *([str(folder / "bin")] if slurm else []), os.environ["PATH"]]
    env = {**os.environ, "PATH": ":".join(path), "STUB_LOG": str(folder / "srun.log"), "OMP_NUM_THREADS": "1"}
    return {name: value for name, value in env.items() if not name.startswith("SLURM_")}


def wrapper(folder: Path, *command: str, slurm: bool = False, code: int = 0) -> str:
    done = subprocess.run(command, cwd=folder, env=environment(folder, slurm), capture_output=True, text=True, timeout=300)
    assert done.returncode == code, f"{done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout + done.stderr


def test_two_at_once_in_one_folder_each_end_in_their_own_table(folder):
    """In a shell, and as a Slurm job with `--wandb_run_id slurm`: training, completions and gold evaluation, from the run's own files."""
    fields = [
        *("python", "online_dpo.py", "--config", "configs/onlinedpo_tiny.yml", "--max_staleness=1", "--generator=hf"),
        *("--reward_model_path", "async_rlhf.rewards.docstrings:gold", "--total_episodes=32", "--per_device_train_batch_size", "16"),
        *("--gradient_accumulation_steps=1", "--eval_steps=2", "--num_eval_prompts=2", "--max_train_samples=64", "--save_steps=0.5"),
        *("--generate_config=tiny_generate.yml", "--learning_rate=1e-3"),
    ]
    few = (ROOT / "configs" / "generate_tiny.yml").read_text().replace("max_eval_samples: 400", "max_eval_samples: 6")
    (folder / "tiny_generate.yml").write_text(few)
    runs = {
        "shell": (["./train_generate_and_eval.sh", *fields, "--output_dir=results/one", "--seed=1"], False),
        "slurm": (
            ["sbatch", "--time=1:00", "train_generate_and_eval.sh", *fields, "--output_dir", "two", "--output_global_parent_dir=results",
             "--wandb_run_id", "slurm", "--seed", "2"],
            True,
        ),
    }  # fmt: skip
    started = {
        name: subprocess.Popen(
            command, cwd=folder, env=environment(folder, slurm), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for name, (command, slurm) in runs.items()
    }
    output = {name: process.communicate(timeout=400)[0] for name, process in started.items()}
    for name, process in started.items():
        assert process.returncode == 0, f"{name}: {output[name][-4000:]}"
    records = {}
    for name, results in (("shell", folder / "results" / "one"), ("slurm", folder / "results" / "4711" / "two")):
        assert "| checkpoint-2 |" in output[name] and "| sft (baseline) |" in output[name]
        evaluation = json.loads((results / "_evaluation" / "results.json").read_text())
        assert list(evaluation["checkpoints"]) == ["checkpoint-1", "checkpoint-2"] and evaluation["prompts"] <= 6
        assert evaluation["settings"]["generations"]["model"] == str(results)
        records[name] = json.loads((results / "run_config.json").read_text())
    assert records["slurm"]["wandb_run_id"] == "results_4711_two" and records["shell"]["wandb_run_id"].startswith("one-")
    assert (records["shell"]["seed"], records["slurm"]["seed"]) == (1, 2)
    assert (folder / "output_dir").resolve() in {folder / "results" / "one", folder / "results" / "4711" / "two"}
    steps = (folder / "srun.log").read_text().splitlines()
    assert len(steps) == 3 and all(step.startswith("srun --nodes=1 --ntasks=1 --cpus-per-task=2 ") for step in steps)
    assert [path.name for path in folder.glob(".output_dir.*")] == []


@pytest.mark.parametrize("slurm", [False, True], ids=["shell", "slurm"])
def test_exit_codes_are_those_of_the_step_that_failed(folder, slurm):
    start = ("sbatch",) if slurm else ()
    for name in ("train.sh", "train_generate_and_eval.sh"):
        said = wrapper(folder, *start, f"./{name}", "bash", "-c", "exit 7", slurm=slurm, code=7)
        assert "exit 7" in said and "evaluating" not in said
    said = wrapper(folder, *start, "./train_generate_and_eval.sh", "true", slurm=slurm, code=1)
    assert "'true' left no results" in said
    leave = 'mkdir -p empty && ln -s "$PWD/empty" "$ASYNC_RLHF_OUTPUT_LINK"'
    said = wrapper(folder, *start, "./train_generate_and_eval.sh", "bash", "-c", leave, slurm=slurm, code=2)
    assert "neither a config.json nor a checkpoint-<update> folder" in said and "load_and_eval" not in said


def test_a_run_that_stopped_to_be_continued_is_queued_again_and_then_resumes(folder):
    """The marker decides, since a launcher makes a code of its own of the run's; on the second start `latest` is asked for."""
    scontrol = folder / "bin" / "scontrol"
    scontrol.write_text('#!/usr/bin/env bash\necho "scontrol $*" >> "$STUB_LOG"\n')
    scontrol.chmod(0o755)
    (folder / "rloo.py").unlink()
    (folder / "rloo.py").write_text(
        "import os, sys\nprint(sys.argv[1:])\nopen(os.environ['ASYNC_RLHF_PREEMPTED'], 'w').write('run')\nsys.exit(1)\n"
    )
    wrapper(folder, "sbatch", "train_generate_and_eval.sh", "python", "rloo.py", "--seed=1", slurm=True, code=85)
    assert "scontrol requeue 4711" in (folder / "srun.log").read_text()
    again = ["env", "SLURM_RESTART_COUNT=1", "sbatch", "train.sh", "python"]
    assert "['--seed=1', '--resume_from_checkpoint', 'latest']" in wrapper(folder, *again, "rloo.py", "--seed=1", slurm=True, code=85)
    assert "['--resume_from_checkpoint=x']" in wrapper(folder, *again, "rloo.py", "--resume_from_checkpoint=x", slurm=True, code=85)
    assert "[]" in wrapper(folder, *again, "-c", "import sys; print(sys.argv[1:])", slurm=True)


@pytest.mark.parametrize("script", ["train.sh", "train_generate_and_eval.sh"])
def test_slurms_warning_reaches_the_run_as_a_file(folder, script):
    """Slurm signals the batch shell alone; the run, under a launcher that would die of the signal, finds the file and ends well."""
    (folder / "ppo.py").unlink()
    (folder / "ppo.py").write_text(
        "import os, pathlib, sys, time\nopen('started', 'w')\n"
        "while not pathlib.Path(os.environ['ASYNC_RLHF_STOP']).exists():\n    time.sleep(0.05)\n"
        "pathlib.Path(os.environ['ASYNC_RLHF_PREEMPTED']).write_text('run')\nsys.exit(3)\n"
    )
    command = ["sbatch", script, "python", "ppo.py"]
    shell = subprocess.Popen(
        command, cwd=folder, env=environment(folder, slurm=True), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    deadline = time.monotonic() + 60
    while not (folder / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    shell.send_signal(signal.SIGUSR1)  # `exec bash`: the batch shell has the stub's process id
    said, _ = shell.communicate(timeout=60)
    assert shell.returncode == 85, said
    assert [path.name for path in folder.glob(".train.*")] == []


def test_words_reach_the_command_as_they_were_typed(folder):
    said = wrapper(folder, "./train.sh", "python", "-c", "import sys; print(sys.argv[1:])", "two words", "--a=b c", "*", "")
    assert "['two words', '--a=b c', '*', '']" in said


def test_a_dry_run_ends_after_the_plan(folder):
    said = wrapper(
        folder, "./train_generate_and_eval.sh", "python", "online_dpo.py", "--config", "configs/onlinedpo_tiny.yml", "--dry_run",
        "--reward_model_path=async_rlhf.rewards.docstrings:gold",
    )  # fmt: skip
    assert "24 updates" in said and "evaluating" not in said and not (folder / "output_dir").exists()


@pytest.mark.full  # three processes that import everything; test_docs.py runs the command in this one
def test_the_papers_command_for_3_and_1_gpus_prints_its_plan(folder):
    """`accelerate launch` with ZeRO-2 and bf16, three processes; the output goes under the global parent."""
    said = wrapper(
        folder, "./train.sh", "accelerate", "launch", "--config_file", "configs/deepspeed_zero2.yaml", "--mixed_precision", "bf16",
        "--num_processes", "3", "online_dpo.py", "--config", "configs/onlinedpo_pythia2.8b_tldr_vllm_bf16_4gpu.yml",
        "--output_dir", "onlinedpo_pythia2.8b_multigpu", "--dry_run",
    )  # fmt: skip
    assert said.count("batch: 504 prompts × 2 = 1008 completions (12 a forward × 28 accumulated × 3 processes × 1 mini-batches)") == 1
    assert "staleness: 1 batches (exact)" in said and "256 updates, 258048 episodes" in said
    assert "where there are GPUs: 3 training processes on cuda:0 to cuda:2; vLLM on cuda:3" in said
    assert "files in results/onlinedpo_pythia2.8b_multigpu: run_config.json, metrics.jsonl, checkpoint-64" in said


def test_without_a_command_the_usage_is_shown(folder):
    assert "usage: ./train.sh COMMAND" in wrapper(folder, "./train.sh", code=2)


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_are_executable_and_begin_with_a_slurm_header(name):
    assert (ROOT / name).stat().st_mode & stat.S_IXUSR
    lines = (ROOT / name).read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash" and lines[1].startswith("#SBATCH")


def test_shellcheck_is_clean():
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([shellcheck, "-x", *WRAPPERS, "slurm_step.sh", ".ci/run"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
