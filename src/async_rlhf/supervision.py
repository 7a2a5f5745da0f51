"""A generator whose engine may die: another one takes its place, with the same weights, and does what was left to do."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from tqdm import tqdm

from async_rlhf.generation import EngineFailure, Finished, Generator, Sampling
from async_rlhf.rollout import Prompt, Rollout
from async_rlhf.weights import Snapshot

Result = TypeVar("Result")


def say(line: str) -> None:
    """Print a line now, on a line of its own where a progress bar stands."""
    tqdm.write(line)
    sys.stdout.flush()


class SupervisedGenerator:
    """The generator that `open_generator` gives, opened anew after an `EngineFailure`, at most `max_restarts` times in all.

    The new engine gets the snapshot that the old one had or was to load, whose file must still be there, and is asked for the completions
    that had not finished. Their noise comes from position and sample, so they are those that the old engine would have given. After every
    load the generator's log-probabilities of the snapshot's probe are compared with the trainer's: `mismatch` is the largest difference.

    Raises:
        EngineFailure: `max_restarts` are spent, or the first engine did not start; caused by the engine's own error.
        RuntimeError: `mismatch` is above `max_mismatch`.
    """

    def __init__(self, open_generator: Callable[[], Generator], max_restarts: int, max_mismatch: float | None = None):
        self.version, self.restarts = -1, 0
        self.mismatch: float | None = None
        self._open_generator, self._max_restarts, self._max_mismatch = open_generator, max_restarts, max_mismatch
        self._generator: Generator | None = None
        self._snapshot: Snapshot | None = None
        self._finished: Finished = {}
        self._wanted = 0
        self._interrupted = False

    @property
    def answered(self) -> float | None:
        generator = self._generator
        return generator and generator.answered

    def progress(self) -> str:
        """From any thread: how far it is, in brackets; empty where there is nothing to tell."""
        said, now = [], time.perf_counter()
        finished = list(self._finished.values())
        if self._wanted:
            last = f", the last {now - finished[-1].finished:.0f} s ago" if finished else ""
            said.append(f"{len(finished)} of {self._wanted} completions{last}")
        answered = self.answered
        if answered is not None:
            said.append(f"its engine answered {time.monotonic() - answered:.0f} s ago")
        if self.restarts:
            said.append(f"restarted {self.restarts} of {self._max_restarts} times")
        return f" ({'; '.join(said)})" if said else ""

    def start(self) -> None:
        self._attempt(lambda generator: None)

    def load_weights(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._attempt(lambda generator: None)
        self.version = snapshot.version

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, finished: Finished | None = None) -> list[Rollout]:
        self._finished, self._wanted = {} if finished is None else finished, len(prompts) * sampling.n
        try:
            return self._attempt(lambda generator: generator.generate(prompts, sampling, self._finished))
        finally:
            self._finished, self._wanted = {}, 0

    def score(self, ids: list[int]) -> list[float]:
        return self._attempt(lambda generator: generator.score(ids))

    def interrupt(self) -> None:
        self._interrupted = True
        if self._generator is not None:
            self._generator.interrupt()

    def close(self) -> None:
        if self._generator is not None:
            self._generator.close()

    def _attempt(self, work: Callable[[Generator], Result]) -> Result:
        while True:
            try:
                return work(self._ready())
            except EngineFailure as failure:
                self._generator.close()
                self._generator = None
                if self.restarts == self._max_restarts or (failure.starting and not self.restarts):
                    if self.restarts:
                        failure.add_note(f"The engine was started again {self.restarts} times (max_engine_restarts).")
                    raise
                self._announce(failure)

    def _ready(self) -> Generator:
        """The generator, opened and with the weights that it is to have."""
        if self._generator is None:
            self._generator = self._open_generator()
        if self._interrupted:  # before there was a generator to tell
            raise InterruptedError
        generator, snapshot = self._generator, self._snapshot
        generator.start()
        if snapshot is not None and generator.version != snapshot.version:
            generator.load_weights(snapshot)
            self.mismatch = self._check(generator, snapshot)
        return generator

    def _announce(self, failure: EngineFailure) -> None:
        self.restarts += 1
        left = f", {len(self._finished)} of {self._wanted} completions are kept" if self._wanted else ""
        weights = f" with weights v{self._snapshot.version}" if self._snapshot else ""
        reason = str(failure).rstrip(".")
        say(f"warning: {reason}; it is started again{weights}, {self.restarts} of {self._max_restarts} times{left}")

    def _check(self, generator: Generator, snapshot: Snapshot) -> float | None:
        scored = generator.score(snapshot.probe_ids) if snapshot.probe_logprobs else []
        if not scored:
            return None
        mismatch = max(abs(a - b) for a, b in zip(scored, snapshot.probe_logprobs, strict=True))
        if self._max_mismatch is not None and not mismatch <= self._max_mismatch:
            raise RuntimeError(
                f"after loading weights v{snapshot.version} the generator's logprobs differ from the trainer's by {mismatch:.3g}, "
                f"over max_logprob_mismatch {self._max_mismatch:.3g}: it samples with other weights than were published"
            )
        return mismatch
