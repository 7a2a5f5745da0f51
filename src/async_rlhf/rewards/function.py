"""A Python function as reward: `path/to/file.py:name` or `package.module:name`.

def name(samples: list[Sample], **arguments) -> list[float]

An `async def` is called for `batch_size` samples at a time, `concurrency` calls at once.
"""

import asyncio
import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from async_rlhf.config import UserError, require, setting
from async_rlhf.rewards.base import RewardContext, RewardSettings, Sample

FUNCTION = re.compile(r"(?P<module>[\w./~-]+(\.py)?):(?P<name>\w+)")


@dataclass
class FunctionSettings(RewardSettings):
    """A Python function."""

    function: str = setting("", "The function, as `path/file.py:name` or `package.module:name`.")
    arguments: dict = setting({}, "Keyword arguments of the function.")
    concurrency: int = setting(16, "Calls of an `async def` at once.")
    batch_size: int = setting(1, "Samples that a call of an `async def` gets.")

    def __post_init__(self):
        for name in ("concurrency", "batch_size"):
            require(getattr(self, name) >= 1, f"{name} {getattr(self, name)}: at least 1")

    def default_name(self) -> str:
        return self.function.rpartition(":")[2]

    def check(self) -> None:
        require(FUNCTION.fullmatch(self.function), f"function {self.function!r}: path/file.py:name or package.module:name is needed")
        function = find_function(self.function)
        require(callable(function), f"function {self.function}: that is no function but a value, {function!r:.100}")
        self._check_arguments(function)

    def _check_arguments(self, function: Callable) -> None:
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # of a function that is not written in Python
            return
        try:
            signature.bind([], **self.arguments)
        except TypeError as error:
            raise UserError(f"function {self.function}: arguments {self.arguments}: {error}; it takes {signature}") from error
        if getattr(function, "checks_arguments", False):
            try:
                function([], **self.arguments)
            except UserError as error:
                raise UserError(f"function {self.function}: arguments: {error}") from error

    def open(self, context: RewardContext) -> "FunctionReward":
        return FunctionReward(self)


class FunctionReward:
    """Calls the function; what it returns is checked by `score_samples`."""

    def __init__(self, settings: FunctionSettings):
        self.settings, self._function = settings, find_function(settings.function)

    def __call__(self, samples: Sequence[Sample]) -> torch.Tensor:
        if inspect.iscoroutinefunction(self._function):
            try:
                return torch.tensor(asyncio.run(self._concurrently(samples)), dtype=torch.float32)
            except ExceptionGroup as group:
                raise group.exceptions[0] from None
        try:
            return torch.as_tensor(self._function(list(samples), **self.settings.arguments), dtype=torch.float32)
        except Exception as error:
            error.add_note(f"raised by reward function {self.settings.function} on {self._culprit(samples)}")
            raise

    async def _concurrently(self, samples: Sequence[Sample]) -> list[float]:
        limit = asyncio.Semaphore(self.settings.concurrency)

        async def score(start: int) -> list[float]:
            chunk = list(samples[start : start + self.settings.batch_size])
            async with limit:
                try:
                    scores = torch.as_tensor(await self._function(chunk, **self.settings.arguments), dtype=torch.float32)
                    if scores.shape != (len(chunk),):
                        raise ValueError(f"{tuple(scores.shape)} scores for {len(chunk)} samples; one a sample is needed")
                    return scores.tolist()
                except Exception as error:
                    error.add_note(f"raised by reward function {self.settings.function} on sample {start}, {chunk[0].response[:200]!r}")
                    raise

        async with asyncio.TaskGroup() as group:  # one failure ends the others
            tasks = [group.create_task(score(start)) for start in range(0, len(samples), self.settings.batch_size)]
        return [value for task in tasks for value in task.result()]

    def _culprit(self, samples: Sequence[Sample]) -> str:
        """The first sample on which the function raises alone."""
        for i, sample in enumerate(samples):
            try:
                self._function([sample], **self.settings.arguments)
            except Exception:
                return f"sample {i}, response {sample.response[:200]!r}"
        return f"{len(samples)} samples; on each alone it does not"


def checks_arguments(function: Callable[..., list[float]]) -> Callable[..., list[float]]:
    """Marks a reward function that does nothing without samples but refuse bad arguments with a `UserError`: it is called so before the
    run, when no model is loaded yet."""
    function.checks_arguments = True
    return function


def find_function(spec: str) -> Callable[[list[Sample]], list[float]]:
    """Import the function that `spec` names.

    Raises:
        UserError: no such file, module or function.
    """
    module_name, name = FUNCTION.fullmatch(spec)["module"], FUNCTION.fullmatch(spec)["name"]
    try:
        if module_name.endswith(".py"):
            path = Path(module_name).expanduser().resolve()
            require(path.is_file(), f"reward function {spec!r}: no file {path}")
            module = _load(path, path.stat().st_mtime_ns)
        else:
            module = importlib.import_module(module_name)
    except UserError:
        raise
    except Exception as error:  # whatever the file does when it is run
        message = f"{type(error).__name__}: {error}"
        raise UserError(f"reward function {spec!r}: cannot import {module_name}: {message}") from error
    require(hasattr(module, name), f"reward function {spec!r}: {module_name} has no {name}")
    return getattr(module, name)


@functools.cache
def _load(path: Path, changed: int) -> ModuleType:
    """The file's module, made once for each version of the file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module
