"""vLLM's engine in processes of its own: kept apart from the trainer's, watched while they work, and ended for sure."""

import asyncio
import gc
import os
import re
import signal
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any

from async_rlhf.config import GeneratorConfig
from async_rlhf.generation import EngineFailure
from async_rlhf.reaper import MARK, Reaper

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

# Left by torchrun, accelerate and Slurm for the trainer's processes; an engine that read them would try to join them.
DISTRIBUTED_VARIABLES = re.compile(
    r"(RANK|LOCAL_RANK|GROUP_RANK|ROLE_RANK|ROLE_NAME|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_WORLD_SIZE|ROLE_WORLD_SIZE|MASTER_ADDR|MASTER_PORT"
    r"|NODE_RANK|OMP_NUM_THREADS|(TORCHELASTIC|TORCH_NCCL|ACCELERATE|FSDP|DEEPSPEED|PMI|PMIX|SLURM)_\w+)"
)
# Sent to the whole process group, or by Slurm to every process of a step: they are the trainer's to act on.
TRAINERS_SIGNALS = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}

POLL_SECONDS = 0.5
PULSE_SECONDS = 2.0  # between two questions to an engine that works
CANCEL_SECONDS, ORDERLY_SECONDS, UNSTART_SECONDS = 2.0, 10.0, 20.0


@contextmanager
def engine_environment(device: str, config: GeneratorConfig, mark: str) -> Iterator[None]:
    """While the engine's processes are spawned, in a thread that does nothing else: no variable of the trainer's process group, the
    engine's own device, the reaper's mark, and the trainer's signals blocked.

    What a process cannot inherit by a variable it inherits from the thread that starts it: cores, since vLLM binds its OpenMP threads
    alone, and blocked signals, from its first instruction on. An engine is ended by SIGKILL, which nothing blocks.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, TRAINERS_SIGNALS)
    resource_tracker.ensure_running()  # multiprocessing's, which serves the trainer too: it gets no mark. Starting it unblocks signals
    signal.pthread_sigmask(signal.SIG_BLOCK, TRAINERS_SIGNALS)
    saved = dict(os.environ)
    for name in filter(DISTRIBUTED_VARIABLES.fullmatch, saved):
        del os.environ[name]
    os.environ |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_NO_USAGE_STATS": "1"}
    os.environ |= {MARK: mark, "SPT_NOENV": "1"}  # a process that sets its title would wipe out the mark
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    kind, _, index = device.partition(":")
    if kind == "cpu":
        os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": index, "VLLM_CPU_KVCACHE_SPACE": str(config.vllm_cpu_kvcache_gib)}
        os.sched_setaffinity(0, set(map(int, index.split(","))))
    else:
        visible = [name for name in saved.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[int(index)] if visible else index
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= saved


class EngineProcess:
    """An `AsyncLLM` with its processes. Made, used and closed in one thread, whose event loop it owns; only `interrupt` is for others.

    What its processes die of, and an engine that gives no answer for `engine_timeout` seconds, is an `EngineFailure`. vLLM's own check of
    health asks the engine nothing. This one asks a running engine its weight version: it answers between two steps.
    """

    def __init__(self, settings: dict[str, Any], device: str, config: GeneratorConfig):
        self.answered: float | None = None
        self._settings, self._device, self._config = settings, device, config
        self._engine: AsyncLLM | None = None
        self._mark = uuid.uuid4().hex
        self._reaper = Reaper(self._mark)
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task | None = None
        self._interrupted = self._failed = False

    def start(self) -> None:
        """Start the processes, once.

        Raises:
            EngineFailure: they did not come up.
            InterruptedError: `interrupt` was called.
        """
        if self._engine is not None:
            return
        started: Future[AsyncLLM] = Future()
        thread = threading.Thread(target=self._start, args=(started,), name="engine start", daemon=True)
        thread.start()
        waited, limit = 0.0, self._config.generator_timeout
        try:
            while not wait([started], POLL_SECONDS).done:
                waited += POLL_SECONDS
                if self._interrupted:
                    raise InterruptedError
                if waited > limit:
                    raise EngineFailure(f"the vLLM engine did not start within {limit:.0f} s (generator_timeout)", starting=True)
            self._engine = started.result()
        except BaseException as error:
            self._interrupted = True
            for _ in range(int(UNSTART_SECONDS / POLL_SECONDS)):  # what it has started, and what it starts until it notices
                self._reaper.kill()
                thread.join(POLL_SECONDS)
                if not thread.is_alive():
                    break
            if isinstance(error, EngineFailure | InterruptedError) or not isinstance(error, Exception):
                raise
            raise EngineFailure(f"the vLLM engine did not start: {error}", starting=True) from error
        self.answered = time.monotonic()

    def _start(self, started: Future) -> None:
        """In a thread of its own: it has its own cores and blocked signals, and the caller can stop waiting for it."""

        async def make():
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**self._settings))

        try:
            with engine_environment(self._device, self._config, self._mark):
                from vllm import AsyncEngineArgs
                from vllm.v1.engine.async_llm import AsyncLLM

                if self._interrupted:
                    raise InterruptedError
                started.set_result(self._loop.run_until_complete(make()))
        except BaseException as error:
            started.set_exception(error)

    def run(self, call: Callable[["AsyncLLM"], Coroutine]) -> Any:
        """What the coroutine `call(engine)` returns.

        Raises:
            EngineFailure: the engine died or got stuck.
            TimeoutError: it answers, and took more than `generator_timeout` seconds all the same.
            InterruptedError: `interrupt` was called.
        """
        self.start()
        if self._interrupted:
            raise InterruptedError
        self._task = self._loop.create_task(self._watched(call))
        try:
            return self._loop.run_until_complete(self._task)
        except asyncio.CancelledError as error:
            raise InterruptedError from error

    def interrupt(self) -> None:
        self._interrupted = True
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(lambda: self._task and self._task.cancel())

    def close(self) -> None:
        """End the processes: in order, which gives back shared memory, where the engine answers soon, and in any case by SIGKILL."""
        if self._engine is not None:
            with suppress(Exception):
                self._loop.run_until_complete(self._end_in_order())
            self._engine.shutdown(timeout=0)
            self._engine.shutdown = lambda: None  # its __del__ calls it, at the interpreter's end if an exception still holds the engine
            with suppress(Exception):
                self._loop.run_until_complete(asyncio.sleep(0))
        self._reaper.close()
        if not self._loop.is_running():  # it is where a start could not be ended
            self._loop.close()
        self._engine = self._task = None
        gc.collect()

    async def _end_in_order(self) -> None:
        if self._task is not None and not self._task.done():  # left by an exception in the loop itself, such as Ctrl-C
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=2 * CANCEL_SECONDS)
        if self._failed:
            return

        async def end():
            await self._engine.pause_generation(mode="abort", clear_cache=False)
            await self._engine.engine_core.call_utility_async("shutdown")

        await asyncio.wait_for(end(), ORDERLY_SECONDS)

    async def _watched(self, call: Callable[["AsyncLLM"], Coroutine]) -> Any:
        limit = self._config.generator_timeout
        work, watch = asyncio.ensure_future(call(self._engine)), asyncio.ensure_future(self._watch())
        try:
            done, _ = await asyncio.wait({work, watch}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise TimeoutError(f"the vLLM engine was not done within {limit:.0f} s (generator_timeout)")
            return (work if work in done else watch).result()
        except EngineFailure:
            self._failed = True
            raise
        except Exception as error:
            if not self._is_engines(error):
                raise
            self._failed = True
            raise EngineFailure(f"the vLLM engine failed: {self._exit_codes() or error}") from error
        finally:
            work.cancel()
            watch.cancel()
            await asyncio.wait({work, watch}, timeout=CANCEL_SECONDS)

    def _is_engines(self, error: Exception) -> bool:
        from vllm.exceptions import VLLMServerError

        raised_inside = type(error) is Exception  # vLLM's form of what a call raised in the engine
        return raised_inside or isinstance(error, VLLMServerError) or self._engine.errored

    def _exit_codes(self) -> str:
        ended = self._engine.engine_core.resources.engine_manager.finished_procs()
        return ", ".join(f"{name} ended with {code}" for name, code in ended.items())

    async def _watch(self) -> None:
        """Ends by an error alone. Silence is counted in waits and not by a clock, which goes on while a run is stopped (Ctrl-Z)."""
        limit = self._config.engine_timeout
        while True:
            answer = asyncio.ensure_future(self._engine.get_weight_version())
            silent = 0.0
            while not answer.done():
                if self._engine.errored:  # a call that waits is not told
                    raise EngineFailure(f"the vLLM engine failed: {self._exit_codes() or 'it reports that it is dead'}")
                if silent >= limit:
                    raise EngineFailure(f"the vLLM engine gave no answer for {limit:.0f} s (engine_timeout)")
                await asyncio.wait({answer}, timeout=min(POLL_SECONDS, limit))
                silent += POLL_SECONDS
            answer.result()
            self.answered = time.monotonic()
            await asyncio.sleep(PULSE_SECONDS)
