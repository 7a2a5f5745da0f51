"""An engine that dies or hangs is started again, nothing is sampled twice, and no process outlives the run."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from test_pipeline import running
from tiny_run import UPDATES, settings
from tiny_run import train as train_run

from async_rlhf.config import GeneratorConfig, UserError
from async_rlhf.engine_process import EngineProcess, engine_environment
from async_rlhf.generation import EngineFailure, FakeGenerator, HFGenerator
from async_rlhf.pipeline import Pacing
from async_rlhf.reaper import MARK, Reaper, marked
from benchmarks.kill_matrix import FAULTS, MOMENTS, SAVE_STEPS, hit


class Engines:
    """Opens fake generators. `deaths[i]` says what the i-th dies of: `start`, `load`, `score`, or the completions that it gives before."""

    def __init__(self, *deaths):
        self.deaths, self.opened, self.sampled = deaths, [], Counter()

    def __call__(self):
        self.opened.append(Fragile(self, dict(enumerate(self.deaths)).get(len(self.opened))))
        return self.opened[-1]


class Fragile(FakeGenerator):
    def __init__(self, engines, death):
        super().__init__(50)
        self.engines, self.death, self.given = engines, death, 0

    def _die_if(self, death, starting=False):
        if self.death == death:
            raise EngineFailure(f"the fake engine died, {death}", starting) from ConnectionError("the engine's own error")

    def start(self):
        self._die_if("start", starting=True)

    def load_weights(self, snapshot):
        self._die_if("load")
        assert snapshot.path is None or snapshot.path.exists()
        super().load_weights(snapshot)

    def score(self, ids):
        self._die_if("score")
        return [-1.0] * (len(ids) - 1)

    def _rollout(self, prompt, sample, *rest):
        self._die_if(self.given)
        self.given += 1
        self.engines.sampled[prompt.position, sample] += 1
        return super()._rollout(prompt, sample, *rest)


def batches_of(engines, max_staleness=1, weight_update="exact", **options):
    """Six batches of four prompts with two completions; snapshots have a file and a probe."""
    batches = []
    with running(engines, 6, Pacing(max_staleness, weight_update), max_mismatch=0.5, **options) as (pipeline, store):
        for update in range(6):
            batches.append(pipeline.get())
            store.publish(update + 1, update + 1, {"weight": torch.zeros(2)}.items(), [5, 6, 7], [-1.0, -1.0])
    return batches


# -- an engine that is replaced ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_update", ["exact", "newest"])
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_completions_that_were_finished_are_kept_and_the_others_are_the_same(capsys, max_staleness, weight_update):
    """The first engine dies after 3 of the 8 completions of batch 2, the second at the first one of batch 4."""
    engines = Engines(2 * 8 + 3, 8 + 5)
    batches = batches_of(engines, max_staleness, weight_update, max_restarts=2)
    assert [[r.response_ids for r in batch.rollouts] for batch in batches] == [
        [r.response_ids for r in batch.rollouts] for batch in batches_of(Engines(), max_staleness, weight_update)
    ]
    assert set(engines.sampled.values()) == {1}
    assert [batch.restarts for batch in batches] == [0, 0, 1, 1, 2, 2]
    assert all({v for r in batch.rollouts for v in r.versions} == {batch.version} for batch in batches)
    if weight_update == "exact":
        assert [batch.version for batch in batches] == [max(0, i - max_staleness) for i in range(6)]
    assert [engine.closed for engine in engines.opened] == [True] * 3
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert warnings == [
        f"warning: the fake engine died, 19; it is started again with weights v{batches[2].version}, 1 of 2 times, "
        "3 of 8 completions are kept",
        f"warning: the fake engine died, 13; it is started again with weights v{batches[4].version}, 2 of 2 times, "
        "0 of 8 completions are kept",
    ]


@pytest.mark.parametrize("deaths", [("load",), ("load", "load"), ("score",), (3, "start", "load")])
def test_every_call_may_find_the_engine_dead(deaths):
    engines = Engines(*deaths)
    batches = batches_of(engines, max_restarts=3)
    assert set(engines.sampled.values()) == {1}
    assert len(engines.sampled) == 6 * 8
    assert batches[-1].restarts == len(deaths)


def test_the_error_is_the_engines_when_the_restarts_are_spent():
    engines = Engines(*[0] * 5)
    with (
        running(engines, 3, Pacing(1), max_restarts=2) as (pipeline, _),
        pytest.raises(EngineFailure, match="the fake engine died") as caught,
    ):
        pipeline.get()
    assert str(caught.value.__cause__) == "the engine's own error"
    assert "2 times (max_engine_restarts)" in caught.value.__notes__[0]
    assert [engine.closed for engine in engines.opened] == [True] * 3


def test_a_first_engine_that_does_not_start_is_not_tried_again():
    engines = Engines("start")
    with running(engines, 3, Pacing(1), max_restarts=2) as (pipeline, _), pytest.raises(EngineFailure, match="died, start"):
        pipeline.get()
    assert len(engines.opened) == 1


def test_weights_that_do_not_arrive_are_no_failure_of_the_engine():
    class Stale(Fragile):
        def score(self, ids):
            return [-2.0] * (len(ids) - 1)

    engines = Engines()
    with running(lambda: Stale(engines, None), 3, Pacing(0), max_restarts=2, max_mismatch=0.5) as (pipeline, store):
        pipeline.get()
        store.publish(1, 1, None, [5, 6], [-1.0])
        with pytest.raises(RuntimeError, match="differ from the trainer's by 1, over max_logprob_mismatch"):
            pipeline.get()


def test_a_run_whose_engine_died_is_the_run_whose_engine_did_not(model_folder, prompts_file, reward_file, tmp_path, monkeypatch):
    class Dying(HFGenerator):
        """Dies in the third call of the first one opened, with half of the completions finished, and at once in that of the second."""

        opened = 0

        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            Dying.opened += 1
            self.number, self.calls = Dying.opened, 0

        def generate(self, prompts, sampling, finished=None):
            self.calls += 1
            if self.number < 3 and self.calls == (3 if self.number == 1 else 1):
                super().generate(prompts[: 4 if self.number == 1 else 0], sampling, finished)
                raise EngineFailure("the engine died")
            missing = [p for p in prompts if (p.position, 0) not in finished]
            assert len(missing) == (4 if self.number == 3 and self.calls == 1 else 8)
            super().generate(missing, sampling, finished)
            return [finished[prompt.position, sample] for prompt in prompts for sample in range(sampling.n)]

    def run(name, **changes):  # sampled prompt by prompt: in a batch of others a completion's log-probabilities are rounded otherwise
        fixed = {"max_staleness": 1, "hf_generation_batch_size": 2}
        return train_run(settings(model_folder, prompts_file, reward_file, tmp_path / name, **fixed, **changes))

    whole, expected = run("whole")
    monkeypatch.setattr("async_rlhf.vllm_utils.HFGenerator", Dying)
    broken, model = run("broken")
    assert [line.pop("generator/restarts") for line in whole] == [0] * UPDATES
    assert [line.pop("generator/restarts") for line in broken] == [0, 0, 2, 2]
    timed = ("time/", "throughput/")
    for a, b in zip(whole, broken, strict=True):
        assert {k: v for k, v in a.items() if not k.startswith(timed)} == {k: v for k, v in b.items() if not k.startswith(timed)}
    for a, b in zip(expected.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)
    Dying.opened = 0
    with pytest.raises(EngineFailure, match="the engine died"):
        run("spent", max_engine_restarts=1, save_steps=1)
    assert [path.name for path in (tmp_path / "spent").glob("*checkpoint-*")] == ["checkpoint-1"]
    assert len((tmp_path / "spent" / "metrics.jsonl").read_text().splitlines()) == 2


def test_settings_of_supervision_are_checked():
    for name, value in (("engine_timeout", 0.0), ("generator_timeout", -1.0), ("max_engine_restarts", -1)):
        with pytest.raises(UserError, match=name):
            GeneratorConfig(**{name: value})


# -- what a wait says -----------------------------------------------------------------------------------------------------------


def test_a_wait_says_what_it_is_for(capsys):
    def slow_score(batch):
        time.sleep(0.3)

    with running(FakeGenerator(50, seconds=0.3), 2, Pacing(0), wait_report=0.1, score=slow_score) as (pipeline, store):
        pipeline.get()
        with pytest.raises(TimeoutError):
            pipeline._timeout = 0.4
            pipeline.get()
        store.publish(1, 1, None)
    lines = capsys.readouterr().out.splitlines()
    assert "waited 0 s for the generator, which is generating train batch 0 with weights v0 (0 of 8 completions)" in lines
    assert any(line.endswith("for the rewards, which are scoring train batch 0") for line in lines)
    assert "waited 0 s for the generator, which is waiting for weights v1" in lines


def test_progress_counts_completions_and_restarts():
    hold = threading.Event()

    class Waiting(Fragile):
        def _rollout(self, prompt, sample, *rest):
            if len(self.engines.sampled) == 5:
                hold.wait(10)
            return super()._rollout(prompt, sample, *rest)

    engines = Engines()
    deaths = iter([2, None])
    with running(lambda: Waiting(engines, next(deaths)), 1, Pacing(0), max_restarts=4) as (pipeline, _):
        while len(engines.sampled) < 5:
            time.sleep(0.01)
        said = pipeline.doing()
        hold.set()
        pipeline.get()
    assert said == "generating train batch 0 with weights v0 (5 of 8 completions, the last 0 s ago; restarted 1 of 4 times)"


# -- the engine's process -------------------------------------------------------------------------------------------------------


class Engine:
    """What `EngineProcess` uses of an `AsyncLLM`."""

    def __init__(self, errored=False, hangs=False):
        manager = SimpleNamespace(finished_procs=lambda: {"EngineCore": -9} if errored else {})
        self.engine_core = SimpleNamespace(resources=SimpleNamespace(engine_manager=manager), call_utility_async=self.answer)
        self.errored, self.hangs, self.shut = errored, hangs, False

    async def answer(self, *args, **options):
        await asyncio.sleep(60 if self.hangs or self.errored else 0)

    get_weight_version = pause_generation = answer

    def shutdown(self, timeout):
        self.shut = True


async def for_ever(engine):
    await asyncio.sleep(60)


async def fails_inside(engine):
    raise Exception("Worker failed with error 'no such file'")


async def refused(engine):
    raise ValueError("a prompt is too long")


async def works(engine):
    await asyncio.sleep(0.01)
    return 7


@pytest.mark.parametrize(
    ("engine", "call", "error", "match"),
    [
        (Engine(), works, None, ""),
        (Engine(hangs=True), for_ever, EngineFailure, r"gave no answer for 1 s \(engine_timeout\)"),
        (Engine(errored=True), for_ever, EngineFailure, "failed: EngineCore ended with -9"),
        (Engine(), fails_inside, EngineFailure, "no such file"),
        (Engine(), refused, ValueError, "a prompt is too long"),
        (Engine(), for_ever, TimeoutError, "generator_timeout"),
    ],
)
def test_an_engine_that_dies_or_hangs_is_noticed(engine, call, error, match):
    import vllm.exceptions  # noqa: F401 (not in the time that is measured)

    process = EngineProcess({}, "cpu:0", GeneratorConfig(engine_timeout=1.0, generator_timeout=2.5))
    process._engine = engine
    started = time.monotonic()
    try:
        if error is None:
            assert process.run(call) == 7
            assert process.answered >= started
        else:
            with pytest.raises(error, match=match):
                process.run(call)
    finally:
        process.close()
    assert time.monotonic() - started < 5
    assert engine.shut


def test_a_call_that_is_interrupted_ends():
    process = EngineProcess({}, "cpu:0", GeneratorConfig())
    process._engine = Engine()
    threading.Timer(0.2, process.interrupt).start()
    for _ in range(2):  # and so does every later one
        with pytest.raises(InterruptedError):
            process.run(for_ever)
    process.close()


def test_signals_of_the_trainer_do_not_reach_the_engine():
    children = []

    def spawn():
        with engine_environment("cpu:" + str(min(os.sched_getaffinity(0))), GeneratorConfig(), "a-test's mark"):
            children.append(subprocess.Popen(["sleep", "60"]))

    thread = threading.Thread(target=spawn)
    thread.start()
    thread.join()
    reaper = Reaper("a-test's mark")
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            children[0].send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            children[0].wait(0.3)
        assert marked("a-test's mark") == [children[0].pid]
    finally:
        reaper.close()
    assert children[0].wait(5) == -signal.SIGKILL
    assert MARK not in os.environ


# -- the reaper -----------------------------------------------------------------------------------------------------------------

OWNER = """
import os, signal, subprocess, sys, time
from async_rlhf.reaper import MARK, Reaper
signal.signal(signal.SIGINT, signal.default_int_handler)  # a process that a shell put into the background ignores it
mark, folder = sys.argv[1:]
reaper = Reaper(mark, folder)
children = [subprocess.Popen(["sleep", "120"], env=os.environ | {MARK: mark}) for _ in range(2)]
children[1].send_signal(signal.SIGSTOP)
print("ready", flush=True)
time.sleep(120)
"""


def gone(mark, seconds=10.0):
    deadline = time.monotonic() + seconds
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not marked(mark)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])  # Ctrl-C goes to the whole group
def test_the_death_of_the_trainer_ends_its_engine(number, tmp_path):
    mark, folder = f"owner-{os.getpid()}-{number}", tmp_path / "snapshots"
    folder.mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", OWNER, mark, folder]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, start_new_session=True)
    assert owner.stdout.readline() == b"ready\n"
    assert len(marked(mark)) == 2
    os.killpg(owner.pid, number)
    owner.wait(10)
    assert gone(mark)
    deadline = time.monotonic() + 5
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not folder.exists()


@pytest.mark.parametrize("shell_is_killed", [False, True])
def test_a_reaper_that_is_closed_ends_what_bears_its_mark_and_nothing_else(shell_is_killed, tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "deleted").mkdir()
    reaper, other = Reaper("mine-a", tmp_path / "deleted"), Reaper("mine-b", tmp_path / "kept")
    children = [subprocess.Popen(["sleep", "60"], env=os.environ | {MARK: mark}) for mark in ("mine-a", "mine-b")]
    children[0].send_signal(signal.SIGSTOP)
    if shell_is_killed:
        reaper._shell.kill()
        reaper._shell.wait()
    reaper.close()
    reaper.close()
    assert children[0].wait(5) == -signal.SIGKILL
    assert children[1].poll() is None
    assert not (tmp_path / "deleted").exists()
    assert (tmp_path / "kept").exists()
    other.close()
    assert children[1].wait(5) == -signal.SIGKILL
    assert marked("mine-b") == []


# -- the real engine --------------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_kill_matrix(fault, moment, tmp_path):
    cell = hit(fault, moment, tmp_path / "cell")
    assert (cell.orphans, cell.snapshots) == (0, 0), cell
    if fault.startswith(("EngineCore", "Worker")):
        assert (cell.outcome, cell.restarts) == ("goes on", 1), cell
    else:
        assert cell.outcome.startswith("ends with"), cell
        assert 0 <= cell.redo <= SAVE_STEPS, cell
    if fault.endswith("raises"):
        assert f"the {fault}" in cell.says, cell
