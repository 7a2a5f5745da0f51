"""A run that is stopped and goes on is the run that was not stopped, bit for bit."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from tiny_run import ALGORITHMS, settings
from transformers import AutoModelForCausalLM

from async_rlhf.checkpoint import MANIFEST, STATE, checkpoints, damage
from async_rlhf.config import UserError
from async_rlhf.trainer import Trainer
from online_dpo import OnlineDPOConfig
from ppo import PPOConfig
from rloo import RLOOConfig

UPDATES, SAVED, STOPPED = 6, 3, 5
CASES = {
    "online_dpo": (OnlineDPOConfig, {"num_mini_batches": 2, "per_device_train_batch_size": 8}),
    "ppo": (PPOConfig, {"adaptive_kl_target": 0.01, "adaptive_kl_horizon": 50.0, "normalize_scores": True, "num_ppo_epochs": 2}),
    "rloo": (RLOOConfig, {}),
    "bo2": (RLOOConfig, {"loss_type": "best_of_n"}),
}


class Stopped(Exception):
    pass


@pytest.fixture
def run(model_folder, prompts_file, reward_file, tmp_path):
    """Runs in `name`; `stop` is the number of updates after which the process ends, as it would by a signal."""

    def run(name, stop=None, case="online_dpo", **changes):
        config_class, own = CASES[case]
        fixed = {"max_staleness": 1, "total_episodes": UPDATES * 16, "save_steps": SAVED, "dump_rollouts": True}
        config = settings(model_folder, prompts_file, reward_file, tmp_path / name, config_class=config_class, **fixed | own | changes)
        trainer = Trainer(config, ALGORITHMS[config_class](config))
        logged = trainer._log

        def log(update, batch):
            logged(update, batch)
            if update + 1 == stop:
                raise Stopped

        trainer._log = log
        if stop is None:
            trainer.run()
        else:
            with pytest.raises(Stopped):
                trainer.run()
        return tmp_path / name

    return run


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_stops_the_run_at_the_end_of_the_update_with_a_checkpoint(run, monkeypatch, tmp_path, number):
    whole = run("whole", save_steps=UPDATES)
    marker = tmp_path / "marker"
    monkeypatch.setenv("ASYNC_RLHF_PREEMPTED", str(marker))
    before = signal.getsignal(number)
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as left:
        train, updates = Trainer._train, []

        def signalled(self, *args):
            updates.append(1)
            if len(updates) == 2:
                os.kill(os.getpid(), number)
            train(self, *args)

        patch.setattr(Trainer, "_train", signalled)
        run("parts", save_steps=UPDATES)
    parts = tmp_path / "parts"
    assert left.value.code == 85 and marker.read_text() == f"{parts}\n" and signal.getsignal(number) is before
    assert [path.name for path in checkpoints(parts)] == ["checkpoint-2"]
    run("parts", save_steps=UPDATES, resume_from_checkpoint="latest", save_total_limit=1)
    assert lines(whole / "metrics.jsonl") == lines(parts / "metrics.jsonl")
    assert all(torch.equal(a, weights(parts)[name]) for name, a in weights(whole).items())


def go_on(folders, output):
    """In a process of its own: a run, from its newest checkpoint."""
    os.environ["TQDM_DISABLE"] = "1"
    torch.set_num_threads(1)
    fixed = dict(max_staleness=1, total_episodes=UPDATES * 16, save_steps=1, dump_rollouts=True, resume_from_checkpoint="latest")
    config = settings(*folders, output, snapshot_dir=str(output.parent), **fixed)
    Trainer(config, ALGORITHMS[type(config)](config)).run()


@pytest.mark.full
@pytest.mark.parametrize("kills", [3, 20])
def test_killed_at_any_moment_and_resumed_ends_in_the_same_weights(model_folder, prompts_file, reward_file, tmp_path, kills):
    """SIGKILL after a random time, again and again; a process that was quicker than its kill is not counted. Then to the end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_resume"])
    folders, draw = (model_folder, prompts_file, reward_file), random.Random(kills)

    def process(name):
        started = context.Process(target=go_on, args=(folders, tmp_path / name))
        started.start()
        return started

    whole = process("whole")
    began = time.monotonic()
    whole.join(120)
    longest, killed = time.monotonic() - began, 0
    assert whole.exitcode == 0
    for attempt in range(3 * kills):
        output = tmp_path / f"parts{attempt}"  # a finished run has nothing left to kill: the next one begins
        while killed < kills:
            run = process(output.name)
            run.join(draw.uniform(0.1, 0.7) * longest)
            if run.exitcode is not None:
                break
            run.kill()
            run.join(20)
            killed += 1
        run = process(output.name)
        run.join(120)
        assert run.exitcode == 0
        assert_same_run(tmp_path / "whole", output)
        if killed == kills:
            break
    assert killed == kills


def lines(file: Path) -> list[dict]:
    """The lines of a log without what measures time."""
    records = [json.loads(line) for line in file.read_text().splitlines()]
    timed = ("time/", "throughput/", "started", "finished")
    return [{name: value for name, value in record.items() if not name.startswith(timed)} for record in records]


def weights(run: Path, updates: int = UPDATES) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(run / f"checkpoint-{updates}", dtype=torch.float32).state_dict()


def assert_same_run(a: Path, b: Path) -> None:
    for file in ("metrics.jsonl", "rollouts.jsonl", "eval.jsonl"):
        assert (a / file).exists() == (b / file).exists(), file
        if (a / file).exists():
            assert lines(a / file) == lines(b / file), file
    assert [path.name for path in checkpoints(a)] == [path.name for path in checkpoints(b)]
    mine, other = weights(a), weights(b)
    for name in mine:
        assert torch.equal(mine[name], other[name]), name


@pytest.mark.parametrize(
    ("case", "max_staleness"),
    [
        pytest.param(case, s, marks=() if s == 1 or (case, s) in {("online_dpo", 0), ("ppo", 3)} else pytest.mark.full)
        for case in CASES
        for s in (0, 1, 3)
    ],
)
def test_stopped_and_resumed_is_not_stopped(run, case, max_staleness):
    """Stopped after update 5, whose last checkpoint is that of update 3: updates 4 to 6 are done again, and every file is the same."""
    whole = run("whole", case=case, max_staleness=max_staleness)
    run("parts", stop=STOPPED, case=case, max_staleness=max_staleness)
    parts = run("parts", case=case, max_staleness=max_staleness, resume_from_checkpoint="latest")
    assert [line["step"] for line in lines(parts / "metrics.jsonl")] == list(range(1, UPDATES + 1))
    assert_same_run(whole, parts)


def test_evaluations_and_a_relative_reward_go_on_too(run, reward_file):
    fixed = dict(eval_steps=2, eval_split="train[:4]", max_staleness=2, reward_model_path=None, completion_column="answer")
    fixed["reward"] = [json.dumps({"function": f"{reward_file}:letters", "relative": True})]
    whole = run("whole", **fixed)
    run("parts", stop=STOPPED, **fixed)
    parts = run("parts", resume_from_checkpoint="latest", **fixed)
    assert [line["version"] for line in lines(parts / "eval.jsonl")] == [0, 2, 6]
    assert_same_run(whole, parts)
    for file in (whole / "completions").iterdir():
        assert file.read_text() == (parts / "completions" / file.name).read_text()


def test_lora_with_its_own_dropout_goes_on_with_the_random_states(run):
    lora = dict(use_peft=True, lora_r=4, lora_dropout=0.3, lora_target_modules=["q_proj"])
    whole = run("whole", **lora)
    run("parts", stop=STOPPED, **lora)
    assert_same_run(whole, run("parts", resume_from_checkpoint="latest", **lora))


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(run, capsys):
    whole = run("whole", save_steps=2)
    parts = run("parts", stop=STOPPED, save_steps=2)
    newest, before = checkpoints(parts)
    file = newest / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-7] ^= 1
    file.write_bytes(content)
    assert damage(newest) == "its file model.safetensors is damaged"
    with pytest.raises(UserError, match=r"model.safetensors is damaged; `latest` takes"):
        run("parts", save_steps=2, resume_from_checkpoint=str(newest))
    run("parts", save_steps=2, resume_from_checkpoint="latest")
    assert f"{newest} is passed over: its file model.safetensors is damaged" in capsys.readouterr().out
    assert before.name == "checkpoint-2"
    assert_same_run(whole, parts)


def test_a_checkpoint_is_whole_or_not_there(run, monkeypatch):
    """The disk is full in the second checkpoint: the error is the disk's, the first stands, and the run goes on from it."""
    whole = run("whole", save_steps=2)
    saves = []

    def full(*args, **kwargs):
        saves.append(1)
        if len(saves) == 2:
            raise OSError(28, "No space left on device")
        return write(*args, **kwargs)

    write = torch.save
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        run("parts", save_steps=2)
    parts = whole.with_name("parts")
    assert [path.name for path in parts.glob("*checkpoint-*")] == ["checkpoint-2"]
    monkeypatch.undo()
    assert_same_run(whole, run("parts", save_steps=2, resume_from_checkpoint="latest"))


def test_other_settings_are_listed(run):
    run("parts", stop=STOPPED)
    with pytest.raises(UserError, match="seed 7 → 8, learning_rate 0.001 → 0.002"):
        run("parts", resume_from_checkpoint="latest", learning_rate=2e-3, seed=8)
    run("parts", resume_from_checkpoint="latest", generator_timeout=60)  # a setting that changes no result may change


def test_what_cannot_be_resumed_says_so(run, tmp_path, capsys):
    parts = run("parts", stop=STOPPED, save_steps=1)
    assert [path.name for path in checkpoints(parts) if (path / STATE).exists()] == ["checkpoint-4", "checkpoint-3"]
    with pytest.raises(UserError, match="it has no trainer_state"):
        run("parts", save_steps=1, resume_from_checkpoint=str(parts / "checkpoint-1"))
    with pytest.raises(UserError, match="no such folder"):
        run("parts", resume_from_checkpoint=str(tmp_path / "absent"))
    with pytest.raises(UserError, match="a run goes on in its own folder"):
        run("other", resume_from_checkpoint=str(parts / "checkpoint-3"))
    with pytest.raises(UserError, match="exclude each other"):
        run("parts", resume_from_checkpoint=str(parts / "checkpoint-3"), overwrite_output_dir=True)
    for path in checkpoints(parts):
        shutil.rmtree(path / STATE, ignore_errors=True)
    with pytest.raises(UserError, match="none of the 4 checkpoints"):
        run("parts", save_steps=1, resume_from_checkpoint="latest")
    run("new", stop=2, resume_from_checkpoint="latest")  # where there is nothing yet: from the start
    assert "the run starts from the beginning" in capsys.readouterr().out
    run("new", resume_from_checkpoint="latest")  # stopped before its first checkpoint: from the start again
    assert [line["step"] for line in lines(tmp_path / "new" / "metrics.jsonl")] == list(range(1, UPDATES + 1))


def test_only_the_newest_checkpoints_are_kept(run):
    done = run("few", save_steps=1, save_total_limit=3)
    assert [path.name for path in checkpoints(done)] == ["checkpoint-6", "checkpoint-5", "checkpoint-4"]
    assert [(path / STATE / MANIFEST).exists() for path in checkpoints(done)] == [True, True, False]
    run("few", save_steps=1, save_total_limit=3, resume_from_checkpoint="latest")  # a finished run has nothing left to do
    assert len(lines(done / "metrics.jsonl")) == UPDATES
