"""The generation thread: pacing, staleness, overlap, and how it ends."""

import threading
import time
from contextlib import contextmanager

import pytest

from async_rlhf.data import PromptStream
from async_rlhf.generation import FakeGenerator, Sampling
from async_rlhf.pipeline import Evaluation, GenerationPipeline, Pacing
from async_rlhf.rollout import Prompt
from async_rlhf.weights import WeightStore

SAMPLING = Sampling(n=2, max_tokens=8, end_ids=(1,))


@contextmanager
def running(generator, batches, pacing, **options):
    store = WeightStore(keep=pacing.max_staleness + 1)
    stream = PromptStream([[5, 6], [7, 8, 9], [10, 11]], seed=0)
    options = {"timeout": 20, **options}
    opened = generator if callable(generator) else lambda: generator
    pipeline = GenerationPipeline(opened, stream, store, SAMPLING, 4, batches, pacing, **options)
    store.publish(0, 0, None)
    pipeline.start()
    try:
        yield pipeline, store
    finally:
        pipeline.close(timeout=5)
        store.close()
    assert not pipeline._thread.is_alive()


def train(pipeline, store, batches, seconds=0.0):
    """Take every batch, train for `seconds`, publish. Returns for each update the staleness of its tokens."""
    staleness = []
    for update in range(batches):
        batch = pipeline.get()
        assert batch.index == update
        staleness.append({update - version for rollout in batch.rollouts for version in rollout.versions})
        time.sleep(seconds)
        store.publish(update + 1, update + 1, None)
    return staleness


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("trainer_seconds", [0.0, 0.02])
def test_exact_trains_every_token_min_batch_s_late(max_staleness, trainer_seconds):
    with running(FakeGenerator(50, seconds=0.005), 12, Pacing(max_staleness)) as (pipeline, store):
        assert train(pipeline, store, 12, trainer_seconds) == [{min(update, max_staleness)} for update in range(12)]


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize(("generator_seconds", "trainer_seconds"), [(0.02, 0.0), (0.0, 0.02)])
def test_newest_is_never_staler_than_s(max_staleness, generator_seconds, trainer_seconds):
    with running(FakeGenerator(50, seconds=generator_seconds), 15, Pacing(max_staleness, "newest")) as (pipeline, store):
        staleness = train(pipeline, store, 15, trainer_seconds)
    assert all(len(s) == 1 and max(s) <= max_staleness for s in staleness)


@pytest.mark.parametrize("weight_update", ["exact", "newest"])
def test_generation_and_training_overlap_from_s_1_on(weight_update):
    """30 batches of 40 ms against 30 updates of 40 ms: side by side they take little more than the larger total, in turn the sum."""
    wall = {}
    for max_staleness in (0, 1):
        generator = FakeGenerator(50, seconds=0.04)
        with running(generator, 30, Pacing(max_staleness, weight_update)) as (pipeline, store):
            started = time.perf_counter()
            train(pipeline, store, 30, seconds=0.04)
            wall[max_staleness] = time.perf_counter() - started
    total = max(generator.busy_seconds, 30 * 0.04)
    assert wall[1] <= 1.15 * total
    assert wall[0] >= 1.9 * 30 * 0.04


def test_nothing_is_generated_that_will_not_be_trained_on():
    generator = FakeGenerator(50)
    with running(generator, 5, Pacing(3)) as (pipeline, store):
        train(pipeline, store, 5)
        time.sleep(0.1)
    assert generator.calls == 5
    assert generator.closed


def test_generation_never_runs_more_than_s_batches_ahead():
    generator = FakeGenerator(50)
    with running(generator, 20, Pacing(2)) as (pipeline, store):
        time.sleep(0.3)
        assert generator.calls == 3  # batches 0, 1 and 2 may use snapshot 0; batch 3 needs snapshot 1
        pipeline.get()
        store.publish(1, 1, None)
        time.sleep(0.3)
        assert generator.calls == 4


def test_a_failing_generator_raises_its_own_error_with_its_traceback():
    with running(FakeGenerator(50, fail_at=2), 5, Pacing(1)) as (pipeline, store):
        pipeline.get()
        store.publish(1, 1, None)
        started = time.perf_counter()
        with pytest.raises(RuntimeError, match="fake generator fails on call 2") as caught:
            pipeline.get()
        assert time.perf_counter() - started < 3
    assert any("generation.py" in str(entry.path) for entry in caught.traceback)


def test_a_generator_that_cannot_start_raises():
    def broken():
        raise OSError("no such engine")

    with running(broken, 5, Pacing(1)) as (pipeline, _), pytest.raises(OSError, match="no such engine"):
        pipeline.get()


def test_a_sleeping_generator_ends_in_an_error_that_says_what_it_was_doing():
    with (
        running(FakeGenerator(50, seconds=60), 5, Pacing(1), timeout=0.5) as (pipeline, _),
        pytest.raises(TimeoutError, match="generating train batch 0 with weights v0"),
    ):
        pipeline.get()


def test_weights_that_never_come_end_the_thread_with_an_error():
    with running(FakeGenerator(50), 5, Pacing(0), timeout=0.5) as (pipeline, _):
        pipeline.get()
        with pytest.raises(TimeoutError, match="snapshot 1|waiting for weights v1"):
            pipeline.get()


def test_a_trainer_that_stops_ends_the_thread_in_mid_generation():
    before = threading.active_count()
    with running(FakeGenerator(50, seconds=60), 5, Pacing(1)):
        time.sleep(0.1)
    assert threading.active_count() == before


def test_evaluations_come_at_multiples_and_at_the_end():
    held_out = Evaluation([Prompt(1 << 40, 0, [5, 6])], Sampling(n=1, max_tokens=4, end_ids=(1,)), every=3)
    with running(FakeGenerator(50), 8, Pacing(1), evaluation=held_out) as (pipeline, store):
        seen, update = [], 0
        while update < 8:
            batch = pipeline.get()
            if batch.kind == "eval":
                seen.append(batch.version)
            else:
                update += 1
                store.publish(update, update, None)
        seen.append(pipeline.get().version)
    assert seen == [0, 3, 6, 8]


def test_a_mismatch_over_the_bound_is_an_error_that_names_the_setting():
    class Stale(FakeGenerator):
        def score(self, ids):
            return [-1.0] * (len(ids) - 1)

    store = WeightStore(keep=2)
    stream = PromptStream([[5, 6]], seed=0)
    pipeline = GenerationPipeline(lambda: Stale(50), stream, store, SAMPLING, 1, 3, Pacing(1), timeout=5, max_mismatch=1e-3)
    store.publish(0, 0, None, [5, 6, 7], [-1.0, -1.2])
    pipeline.start()
    with pytest.raises(RuntimeError, match="differ from the trainer's by 0.2, over max_logprob_mismatch"):
        pipeline.get()
    pipeline.close()
    store.close()


def test_batches_are_scored_while_they_wait_for_the_trainer():
    """Six batches, 40 ms of scoring each and 40 ms of training: the trainer waits for the first score alone."""

    def score(batch):
        time.sleep(0.04)
        for rollout in batch.rollouts:
            rollout.rewards = {"length": float(len(rollout.response_ids))}

    with running(FakeGenerator(50), 6, Pacing(1), score=score) as (pipeline, store):
        waited = []
        for update in range(6):
            started = time.perf_counter()
            batch = pipeline.get()
            waited.append(time.perf_counter() - started)
            assert [rollout.rewards["length"] for rollout in batch.rollouts] == [len(r.response_ids) for r in batch.rollouts]
            store.publish(update + 1, update + 1, None)
            time.sleep(0.04)
    assert sum(waited[1:]) < 0.1


def test_a_reward_that_fails_or_hangs_in_the_scoring_thread_is_an_error_of_get():
    def broken(batch):
        raise ConnectionError("no judge")

    with running(FakeGenerator(50), 3, Pacing(1), score=broken) as (pipeline, _), pytest.raises(ConnectionError, match="no judge"):
        pipeline.get()
    hung = threading.Event()
    with (
        running(FakeGenerator(50), 3, Pacing(1), timeout=0.5, score=lambda batch: hung.wait(20)) as (pipeline, _),
        pytest.raises(TimeoutError, match="the rewards are still scoring"),
    ):
        pipeline.get()
    hung.set()
