"""Writes the tables of docs/configs.md from the help strings of the dataclasses and from the files of configs/.

    python docs/make_configs.py

What stands above the marker in docs/configs.md is written by hand and stays as it is.
"""

import importlib
import re
import sys
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "configs.md"
MARKER = "<!-- From here on written by docs/make_configs.py. -->"
SCRIPTS = {  # a script and the class of its settings; a new one is a line here
    "sft": "SFTScriptConfig",
    "relabel_with_rm": "RelabelConfig",
    "reward_modeling": "RewardModelingConfig",
    "online_dpo": "OnlineDPOConfig",
    "ppo": "PPOConfig",
    "rloo": "RLOOConfig",
    "serve_reward_model": "ServeConfig",
    "generate_for_eval": "GenerateConfig",
    "load_and_eval": "EvaluateConfig",
}


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """The whole of docs/configs.md: what is written by hand, and the tables."""
    by_hand = PAGE.read_text(encoding="utf-8").split(MARKER)[0]
    classes = script_classes()
    shared = {group.__name__: group for config in classes.values() for group in groups(config)}
    parts = [f"{by_hand}{MARKER}", "## The files of `configs/`", files_table(), "## Scripts"]
    parts += [script_section(name, config) for name, config in classes.items()]
    parts += ["## Shared settings", "A class's own fields; those of a script that takes the class are its table and these."]
    parts += [f"### {name}\n\n{summary(group)}\n\n{fields_table(group)}" for name, group in sorted(shared.items())]
    return "\n\n".join(parts) + "\n"


def script_classes() -> dict[str, type]:
    """The class of settings of every script."""
    sys.path[:0] = [] if str(ROOT) in sys.path else [str(ROOT)]
    return {name: getattr(importlib.import_module(name), config) for name, config in SCRIPTS.items()}


# -- sections -----------------------------------------------------------------------------------------------------------------


def script_section(name: str, config: type) -> str:
    links = ", ".join(f"[{group.__name__}](#{group.__name__.lower()})" for group in groups(config))
    parts = [f"### `{name}.py`", summary(config), f"Takes {links}; and its own:", fields_table(config)]
    library = library_class(config)
    if library:
        theirs = {field.name: default(field) for field in fields(library)}
        changed = [field for field in fields(config) if field.name in theirs and theirs[field.name] != default(field)]
        rows = [[f"`{field.name}`", as_yaml(theirs[field.name]), as_yaml(default(field))] for field in changed]
        parts.append(
            f"Every field of {library.__module__.split('.')[0].upper()}'s `{library.__name__}` is a setting too, {len(theirs)} in all; "
            "`--help` lists them. Defaults that are not its own:"
        )
        parts.append(table(["field", f"`{library.__name__}`", "here"], rows))
    return "\n\n".join(part for part in parts if part)


def summary(config: type) -> str:
    """The docstring, if it has one: `dataclass` gives a class without one its signature."""
    text = config.__doc__ or ""
    return "" if text.startswith(f"{config.__name__}(") else " ".join(text.split())


def files_table() -> str:
    rows = []
    for path in sorted([*ROOT.glob("configs/*.yml"), *ROOT.glob("configs/*.yaml")]):
        comment = " ".join(line[1:].strip() for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
        rows.append([f"`{path.name}`", re.split(r"(?<=\.) ", comment)[0], gpus(path, comment)])
    return table(["file", "what it is", "GPUs"], rows)


def gpus(path: Path, comment: str) -> str:
    """As the name says (`_4gpu`), or the launch command, or the launch file; the small ones run on a CPU."""
    if path.suffix == ".yaml":
        return f"{yaml.safe_load(path.read_text(encoding='utf-8'))['num_processes']} processes"
    if re.search(r"tiny|smollm2|minilm", path.name):
        return "none"
    found = re.search(r"_(\d+)gpu", path.name) or re.search(r"--num_processes (\d+)", comment)
    return found[1] if found else "1"


# -- classes and their fields -------------------------------------------------------------------------------------------------


def is_ours(config: type) -> bool:
    return is_dataclass(config) and config.__module__.split(".")[0] in {"async_rlhf", *SCRIPTS}


def groups(config: type) -> list[type]:
    """The shared classes that a script's class is made of."""
    return [base for base in config.__mro__[1:] if is_ours(base)]


def library_class(config: type) -> type | None:
    """The class of a library, TRL's, whose fields are settings too."""
    return next((base for base in config.__mro__ if is_dataclass(base) and not is_ours(base)), None)


def default(field: Field) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


# -- text ---------------------------------------------------------------------------------------------------------------------


def fields_table(config: type) -> str:
    """The fields that the class declares itself, those that it only gives another default included."""
    types = config.__annotations__  # `HfArgumentParser` changes those in the fields
    own = [field for field in fields(config) if field.name in types]
    rows = [[f"`{field.name}`", as_type(types[field.name]), as_yaml(default(field)), field.metadata["help"]] for field in own]
    return table(["field", "type", "default", ""], rows)


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    def cell(text: str) -> str:
        return text.replace("|", "\\|").replace("\n", "\\n")

    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)


def as_type(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(as_type(one) for one in get_args(kind))
    if kind is NoneType:
        return "null"
    return f"`{kind.__name__ if isinstance(kind, type) and not get_args(kind) else kind}`"


def as_yaml(value: Any) -> str:
    """A value as a YAML file holds it."""
    text = yaml.safe_dump(value, default_flow_style=True, width=1000)
    return "`" + text.removesuffix("...\n").strip() + "`"


if __name__ == "__main__":
    main()
