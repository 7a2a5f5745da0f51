"""From what a configuration names to a reward."""

from pathlib import Path

import torch

from async_rlhf.models import check_model_path
from async_rlhf.rewards.base import Reward
from async_rlhf.rewards.function import FUNCTION, FunctionReward, find_function
from async_rlhf.rewards.model import RewardModel


def is_function(spec: str) -> bool:
    """Whether a reward is named as `path/to/file.py:name` or `package.module:name`, and not as a model."""
    return FUNCTION.fullmatch(spec) is not None


def check_reward(spec: str | None, field_name: str) -> None:
    """Raise `UserError` if the reward cannot be: no such model folder, file or function. Loads no model."""
    if spec and is_function(spec):
        find_function(spec)
    else:
        check_model_path(spec, field_name, adapters=True)


def load_reward(spec: str, device: torch.device | str = "cpu", **model_settings) -> Reward:
    """The reward that `spec` names: a Python function, or a reward model (folder or hub name, a LoRA adapter's too) on `device`.

    Raises:
        UserError: nothing there, or a model that gives more than one score.
    """
    if is_function(spec):
        return FunctionReward(spec)
    return RewardModel(str(Path(spec).expanduser()) if Path(spec).exists() else spec, device, **model_settings)
