"""The generation thread: it samples ahead of the trainer, by at most `max_staleness` batches, and hands over through a queue."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from async_rlhf.data import PromptStream
from async_rlhf.generation import Generator, Sampling
from async_rlhf.rollout import Prompt, RolloutBatch
from async_rlhf.weights import Snapshot, WeightStore

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

    Batches `first_batch … num_batches − 1` come out of `get` in order, and no batch is made beyond the last. Whatever fails
    in the thread is raised by `get` with its own traceback; `close` ends the thread from any state. `score`, if there is one, gives a
    batch's rollouts their `rewards` while it waits in the queue, in a thread of its own.
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
    ):
        self._open_generator, self._stream, self._store, self._sampling = open_generator, stream, store, sampling
        self._prompts_per_batch, self._num_batches, self._first_batch = prompts_per_batch, num_batches, first_batch
        self._pacing, self._timeout, self._evaluation, self._max_mismatch = pacing, timeout, evaluation, max_mismatch
        self._score, self._scorer = score, ThreadPoolExecutor(1, "scoring") if score else None
        self._queue: queue.Queue[tuple[RolloutBatch, Future | None] | BaseException] = queue.Queue(
            maxsize=2 * (pacing.max_staleness + 1) + 1
        )
        self._stop = threading.Event()
        self._generator: Generator | None = None
        self._doing = "starting its engine"
        self._held, self._taken = deque(held), first_batch - 1  # batches taken and not yet given out; the last one taken
        self._evaluated = self._evaluated_before_taken = evaluated
        self._mismatch: float | None = None
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)

    def start(self) -> None:
        self._thread.start()

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
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                item = self._queue.get(timeout=POLL_SECONDS)
            except queue.Empty:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"no batch within {self._timeout:.0f} s (generator_timeout): the generator is {self._doing}"
                    ) from None
                if not self._thread.is_alive() and self._queue.empty():
                    raise RuntimeError("the generation thread has ended; there is no further batch") from None
                continue
            if isinstance(item, BaseException):
                raise item
            batch, scoring = item
            if scoring is not None:
                self._wait_for_scores(scoring, deadline)
            if batch.kind == "train":
                self._taken = batch.index
                self._evaluated_before_taken = self._due(batch.version)
            return batch

    def _wait_for_scores(self, scoring: Future, deadline: float) -> None:
        if wait([scoring], max(0.0, deadline - time.monotonic())).not_done:
            raise TimeoutError(f"no batch within {self._timeout:.0f} s (generator_timeout): the rewards are still scoring one")
        scoring.result()

    def close(self, timeout: float = 30.0) -> None:
        """End the thread, a running generation included, and close the generator."""
        self._stop.set()
        if self._generator is not None and self._thread.is_alive():
            self._generator.interrupt()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        if self._scorer:
            self._scorer.shutdown(wait=False, cancel_futures=True)

    # -- in the thread ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._generator = self._open_generator()
            for batch in range(self._first_batch, self._num_batches):
                version, newest = self._pacing.required_version(batch), self._pacing.weight_update == "newest"
                loaded = self._load(version, newest)
                self._evaluate_if_due()
                first = batch * self._prompts_per_batch
                self._generate(batch, self._stream.take(first, self._prompts_per_batch), self._sampling, "train", loaded)
            if self._evaluation:
                self._load(self._num_batches, newest=False)
                self._evaluate_if_due(last=True)
        except InterruptedError:
            pass
        except BaseException as error:  # it belongs to the trainer's thread, which raises it
            self._put(error)
        finally:
            self._doing = "closed"
            if self._generator is not None:
                self._generator.close()

    def _load(self, version: int, newest: bool) -> dict:
        """Wait for the snapshot and load it, unless the generator has it already. Returns what that cost and showed."""
        waiting = time.perf_counter()
        self._doing = f"waiting for weights v{version}"
        with self._store.reading(version, newest, self._timeout, self._stop) as snapshot:
            loading = time.perf_counter()
            loaded = {"generator_wait_seconds": loading - waiting}
            if snapshot.version != self._generator.version:
                self._doing = f"loading weights v{snapshot.version}"
                self._generator.load_weights(snapshot)
                self._mismatch = self._check(snapshot)
                loaded["weight_sync_seconds"] = time.perf_counter() - loading
        return {**loaded, "mismatch": self._mismatch}

    def _check(self, snapshot: Snapshot) -> float | None:
        """Largest difference, over the probe's tokens, between the generator's log-probabilities and the trainer's."""
        scored = self._generator.score(snapshot.probe_ids) if snapshot.probe_logprobs else []
        if not scored:
            return None
        mismatch = max(abs(a - b) for a, b in zip(scored, snapshot.probe_logprobs, strict=True))
        if self._max_mismatch is not None and not mismatch <= self._max_mismatch:
            raise RuntimeError(
                f"after loading weights v{snapshot.version} the generator's logprobs differ from the trainer's by {mismatch:.3g}, "
                f"over max_logprob_mismatch {self._max_mismatch:.3g}: it samples with other weights than were published"
            )
        return mismatch

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
        seconds = time.perf_counter() - started
        batch = RolloutBatch(index, rollouts, self._generator.version, kind=kind, generate_seconds=seconds, **loaded)
        self._put((batch, self._scorer.submit(self._score, batch) if self._scorer else None))

    def _put(self, item: tuple[RolloutBatch, Future | None] | BaseException) -> None:
        while not self._stop.is_set():
            try:
                return self._queue.put(item, timeout=POLL_SECONDS)
            except queue.Full:
                self._doing = "waiting for the trainer to take a batch"
