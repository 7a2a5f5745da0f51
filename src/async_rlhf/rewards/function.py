"""A Python function as reward: `path/to/file.py:name` or `package.module:name`.

def name(samples: list[Sample]) -> list[float]
"""

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from async_rlhf.config import UserError, require
from async_rlhf.rewards.base import Sample

FUNCTION = re.compile(r"(?P<module>[\w./~-]+(\.py)?):(?P<name>\w+)")


class FunctionReward:
    """Calls the function with a list of samples; what it returns is checked by `score_samples`."""

    def __init__(self, spec: str):
        self.spec, self._function = spec, find_function(spec)

    def __call__(self, samples: Sequence[Sample]) -> torch.Tensor:
        try:
            return torch.as_tensor(self._function(list(samples)), dtype=torch.float32)
        except Exception as error:
            error.add_note(f"raised by reward function {self.spec} on {len(samples)} samples")
            raise


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
            module_spec = importlib.util.spec_from_file_location(path.stem, path)
            module = importlib.util.module_from_spec(module_spec)
            sys.modules.setdefault(path.stem, module)
            module_spec.loader.exec_module(module)
        else:
            module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(f"reward function {spec!r}: cannot import {module_name}: {error}") from error
    require(hasattr(module, name), f"reward function {spec!r}: {module_name} has no {name}")
    return getattr(module, name)
