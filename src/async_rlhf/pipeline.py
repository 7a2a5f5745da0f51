"""The generation thread: it samples ahead of the trainer, by at most `max_staleness` batches, and hands over through a queue."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass

from async_rlhf.data import PromptStream
from async_rlhf.generation import Generator, Sampling
from async_rlhf.rollout import Prompt, RolloutBatch
from async_rlhf.supervision import SupervisedGenerator, say
from async_rlhf.weights import WeightStore

POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Pacing:
    """How far generation may run ahead, in batches, and with which snapshot it samples."""

    max_staleness: int
    weight_update: str = "exact"

    def required_version(self, batch: int) -> int:
        """The snapshot that must exist before batch `batch` is generated."""
        return max(0, batch - self.max_staleness)


@dataclass(frozen=True)
class Evaluation:
    """Held-out prompts sampled at snapshots 0, `every`, 2·`every`, … and at the last one."""

    prompts: list[Prompt]
    sampling: Sampling
    every: int


class GenerationPipeline:
    """Runs a generator in a thread of its own.

    Batches `first_batch … num_batches − 1` come out of `get` in order, and no batch is made beyond the last. An engine that fails is
    started again, `max_restarts` times in all; whatever else fails in the thread is raised by `get` with its own traceback. `close` ends
    the thread from any state. `score`, if there is one, gives a batch's rollouts their `rewards` while it waits in the queue, in a thread
    of its own. What `get` waits for is said every `wait_report` seconds.
    """

    def __init__(
        self,
        open_generator: Callable[[], Generator],
        stream: PromptStream,
        store: WeightStore,
        sampling: Sampling,
        prompts_per_batch: int,
        num_batches: int,
        pacing: Pacing,
        timeout: float,
        evaluation: Evaluation | None = None,
        max_mismatch: float | None = None,
        first_batch: int = 0,
        held: Sequence[RolloutBatch] = (),
        evaluated: int = -1,
        score: Callable[[RolloutBatch], None] | None = None,
        max_restarts: int = 0,
        wait_report: float = 60.0,
    ):
        self._generator = SupervisedGenerator(open_generator, max_restarts, max_mismatch)
        self._stream, self._store, self._sampling, self._wait_report = stream, store, sampling, wait_report
        self._prompts_per_batch, self._num_batches, self._first_batch = prompts_per_batch, num_batches, first_batch
        self._pacing, self._timeout, self._evaluation = pacing, timeout, evaluation
        self._score, self._to_score = score, queue.SimpleQueue()
        self._queue: queue.Queue[tuple[RolloutBatch, Future | None] | BaseException] = queue.Queue(
            maxsize=2 * (pacing.max_staleness + 1) + 1
        )
        self._stop = threading.Event()
        self._doing = "starting"
        self._held, self._taken = deque(held), first_batch - 1  # batches taken and not yet given out; the last one taken
        self._evaluated = self._evaluated_before_taken = evaluated
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)

    def start(self) -> None:
        self._thread.start()
        if self._score:
            threading.Thread(target=self._score_in_turn, name="scoring", daemon=True).start()

    def hold(self, until: int) -> tuple[list[RolloutBatch], int]:
        """Wait for all batches before `until`, keep them for `get`, and give them with the number of the last evaluation before their end.

        With the snapshot of now these are what a run goes on from: after `until − max_staleness` updates, what they were sampled with is
        not needed again.

        Raises:
            as `get`.
        """
        while self._taken < min(until, self._num_batches) - 1:
            self._held.append(self._take())
        return list(self._held), self._evaluated_before_taken

    def get(self) -> RolloutBatch:
        """The next batch: training batches in order, an evaluation wherever one falls due.

        Raises:
            TimeoutError: none came within `timeout` seconds; it says what the generator was doing.
            Exception: whatever the generation thread, or a reward in the scoring thread, failed with.
        """
        return self._held.popleft() if self._held else self._take()

    def _take(self) -> RolloutBatch:
        started = time.monotonic()
        reported = 0
        while True:
            waited = time.monotonic() - started
            if waited >= (reported + 1) * self._wait_report:
                reported = int(waited / self._wait_report)
                say(f"waited {waited:.0f} s for the generator, which is {self.doing()}")
            try:
                item = self._queue.get(timeout=min(POLL_SECONDS, self._wait_report))
            except queue.Empty:
                if waited > self._timeout:
                    raise TimeoutError(
                        f"no batch within {self._timeout:.0f} s (generator_timeout): the generator is {self.doing()}"
                    ) from None
                if not self._thread.is_alive() and self._queue.empty():
                    raise RuntimeError("the generation thread has ended; there is no further batch") from None
                continue
            if isinstance(item, BaseException):
                raise item
            batch, scoring = item
            if scoring is not None:
                self._wait_for_scores(batch, scoring, started)
            if batch.kind == "train":
                self._taken = batch.index
                self._evaluated_before_taken = self._due(batch.version)
            return batch

    def _wait_for_scores(self, batch: RolloutBatch, scoring: Future, started: float) -> None:
        while True:
            left = max(0.0, started + self._timeout - time.monotonic())
            if not wait([scoring], min(left, self._wait_report)).not_done:
                return scoring.result()
            waited = time.monotonic() - started
            if waited >= self._timeout:
                raise TimeoutError(f"no batch within {self._timeout:.0f} s (generator_timeout): the rewards are still scoring one")
            say(f"waited {waited:.0f} s for the rewards, which are scoring {batch.kind} batch {batch.index}")

    def doing(self) -> str:
        """From any thread: what the generation thread is doing, and how far it is."""
        return self._doing + self._generator.progress()

    def close(self, timeout: float = 30.0) -> None:
        """End the thread, a running generation included, and close the generator."""
        self._stop.set()
        self._to_score.put(None)
        if self._thread.is_alive():
            self._generator.interrupt()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    # -- in the threads -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._doing = "starting its engine"
            self._generator.start()
            for batch in range(self._first_batch, self._num_batches):
                version, newest = self._pacing.required_version(batch), self._pacing.weight_update == "newest"
                with self._loaded(version, newest) as loaded:
                    self._evaluate_if_due()
                    first = batch * self._prompts_per_batch
                    self._generate(batch, self._stream.take(first, self._prompts_per_batch), self._sampling, "train", loaded)
            if self._evaluation:
                with self._loaded(self._num_batches, newest=False):
                    self._evaluate_if_due(last=True)
        except InterruptedError:
            pass
        except BaseException as error:  # it belongs to the trainer's thread, which raises it
            self._put(error)
        finally:
            self._doing = "closed"
            self._generator.close()

    def _score_in_turn(self) -> None:
        while (item := self._to_score.get()) is not None and not self._stop.is_set():
            batch, scoring = item
            try:
                scoring.set_result(self._score(batch))
            except BaseException as error:  # it belongs to the trainer's thread, as above
                scoring.set_exception(error)

    @contextmanager
    def _loaded(self, version: int, newest: bool) -> Iterator[dict]:
        """Wait for the snapshot and load it, unless the generator has it already; gives the seconds that took. The snapshot stays while
        the block runs, for an engine that must be started again."""
        waiting = time.perf_counter()
        self._doing = f"waiting for weights v{version}"
        with self._store.reading(version, newest, self._timeout, self._stop) as snapshot:
            loading = time.perf_counter()
            loaded = {"generator_wait_seconds": loading - waiting}
            if snapshot.version != self._generator.version:
                self._doing = f"loading weights v{snapshot.version}"
                self._generator.load_weights(snapshot)
                loaded["weight_sync_seconds"] = time.perf_counter() - loading
            yield loaded

    def _evaluate_if_due(self, last: bool = False) -> None:
        if self._evaluation is None:
            return
        version = self._generator.version
        due = None if last else self._due(version)
        if due == self._evaluated:
            return
        self._evaluated = due
        self._generate(version, self._evaluation.prompts, self._evaluation.sampling, "eval", {})

    def _due(self, version: int) -> int:
        """The number of the evaluation that falls due at or before the snapshot; -1 without evaluations."""
        return version // self._evaluation.every if self._evaluation else -1

    def _generate(self, index: int, prompts: list[Prompt], sampling: Sampling, kind: str, loaded: dict) -> None:
        self._doing = f"generating {kind} batch {index} with weights v{self._generator.version}"
        started = time.perf_counter()
        rollouts = self._generator.generate(prompts, sampling)
        loaded |= {"mismatch": self._generator.mismatch, "restarts": self._generator.restarts}
        seconds = time.perf_counter() - started
        batch, scoring = RolloutBatch(index, rollouts, self._generator.version, kind=kind, generate_seconds=seconds, **loaded), None
        if self._score:
            scoring = Future()
            self._to_score.put((batch, scoring))
        self._put((batch, scoring))

    def _put(self, item: tuple[RolloutBatch, Future | None] | BaseException) -> None:
        while not self._stop.is_set():
            try:
                return self._queue.put(item, timeout=POLL_SECONDS)
            except queue.Full:
                self._doing = "waiting for the trainer to take a batch"
