"""From what a configuration names to rewards.

A reward is named by a string: a model folder or hub name, `file.py:name` or `package.module:name` for a Python function, a URL, or a JSON
mapping whose first key is its kind: `{"model": "folder", "max_length": 512, "weight": 0.5}`.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields

from async_rlhf.config import UserError, from_mapping, require
from async_rlhf.rewards.base import RewardContext, RewardSettings
from async_rlhf.rewards.combined import RewardPart, RewardSet
from async_rlhf.rewards.function import FUNCTION, FunctionSettings
from async_rlhf.rewards.judge import JudgeSettings
from async_rlhf.rewards.model import ModelSettings
from async_rlhf.rewards.remote import RemoteSettings

KINDS: dict[str, type[RewardSettings]] = {  # `model` is the last: a judge has a setting of that name
    "function": FunctionSettings,
    "remote": RemoteSettings,
    "judge": JudgeSettings,
    "model": ModelSettings,
}


def read_rewards(specs: Sequence[str | None], field: str) -> dict[str, RewardSettings]:
    """The settings of every reward, by its name. Loads no model and asks no server.

    Raises:
        UserError: none, an unknown kind or setting, two of one name, or no such model folder, file or function; it begins with `field`.
    """
    require(specs and all(specs), f"{field} is not set: a model, a function or another reward is needed")
    settings = [_read(spec, field) for spec in specs]
    for one in settings:
        try:
            one.check()
        except UserError as error:
            raise UserError(f"{field}: {error}") from error
    names = [one.name or one.default_name() for one in settings]
    twice = [name for name, count in Counter(names).items() if count > 1]
    require(not twice, f"{field}: {len(names)} rewards, two of them named {', '.join(twice)}: set their `name`")
    return dict(zip(names, settings, strict=True))


def load_rewards(specs: Sequence[str | None], field: str, context: RewardContext) -> RewardSet:
    """The rewards, ready to score.

    Raises:
        UserError: as `read_rewards`, and a model that gives more than one score.
    """
    return RewardSet([RewardPart(name, one, one.open(context)) for name, one in read_rewards(specs, field).items()])


def _read(spec: str, field: str) -> RewardSettings:
    if not spec.lstrip().startswith("{"):
        kind = "remote" if spec.startswith(("http://", "https://")) else "function" if FUNCTION.fullmatch(spec) else "model"
        return KINDS[kind](**{kind: spec})
    try:
        mapping = json.loads(spec)
    except ValueError as error:
        raise UserError(f"{field} {spec!r}: no JSON mapping: {error}") from error
    kind = next((key for key in KINDS if key in mapping), None)
    require(kind, f"{field} {spec}: one of {', '.join(KINDS)} is needed, to say what the reward is")
    settings = from_mapping(KINDS[kind], mapping, field)
    require(getattr(settings, kind), f"{field} {spec}: {kind} is empty")
    return settings


def settings_of(kind: str) -> dict[str, str]:
    """Help strings of a kind's settings, by name."""
    return {f.name: f.metadata["help"] for f in fields(KINDS[kind])}
