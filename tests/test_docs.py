"""The README and docs/: every command in them is run, as a dry run, and what they list is what is there.

A command is a line of a code block, or inline code that names a script or a make target. A line below it that starts with `error:` is
what it must say. The commands of docs/your_own_data.md are run for real, by test_your_own_data.py.
"""

import functools
import importlib
import importlib.util
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from conftest import ROOT
from datasets import Dataset, DatasetDict
from transformers import TrainingArguments

import async_rlhf.data
from async_rlhf.config import UserError, parse
from async_rlhf.docstrings import docstrings
from async_rlhf.evaluation import Measured, compare, summarize, tracked_values
from async_rlhf.runs import record_run

PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
RUN_FOR_REAL = "docs/your_own_data.md"

# -- reading the pages --------------------------------------------------------------------------------------------------------

TOOLS = ("tensorboard", "trackio", "wandb", "ruff", "pytest")  # come with the requirements
PREPARATION = ("cd", "git", "pip", "source")  # of the machine: not run
SHELL_WORDS = {
    *("python", "python3", "make", "accelerate", "sbatch", *TOOLS, *PREPARATION),
    *("bash", "cat", "conda", "curl", "docker", "export", "head", "hf", "jq", "ls", "nohup", "nvidia-smi", "rm", "scancel", "screen", "sh"),
    *("squeue", "srun", "ssh", "tail", "tmux", "torchrun", "uv", "watch", "wget"),
}
VARIABLE = re.compile(r"([A-Z][A-Z0-9_]*)=(\S*)")
FILE_ABOVE = re.compile(r"`([\w./-]+\.(?:py|ya?ml|jsonl))`[^`]*:$")
FILE_WITHIN = re.compile(r"# ([\w./-]+\.(?:py|ya?ml))\b")


@dataclass(frozen=True)
class Command:
    page: str
    line: int
    text: str
    error: str | None = None  # what it must say, where it is shown to fail

    def __str__(self) -> str:
        return f"{self.page}:{self.line} {' '.join(self.text.split())[:60]}"


@dataclass
class Block:
    """A code block, fenced or indented: the number of its first line, the text above it, and its lines without their indent."""

    line: int
    lead: str
    lines: list[str]

    def paragraphs(self) -> Iterator[tuple[int, list[str]]]:
        """What stands between blank lines, each with the number of its first line."""
        start = 0
        for i, line in enumerate([*self.lines, ""]):
            if not line.strip():
                if i > start:
                    yield self.line + start, self.lines[start:i]
                start = i + 1


def split_page(text: str) -> tuple[list[Block], str]:
    """The code blocks, and the text without them, in which lines keep their numbers."""
    blocks, prose, lead, fence, current = [], [], "", None, None
    for number, line in enumerate(text.splitlines(), 1):
        ticks = re.match(r"( *)```", line)
        if ticks:
            fence, current = (len(ticks[1]), None) if fence is None else (None, None)
        elif fence is not None or line.startswith("    ") or (current and not line.strip()):
            if current is None:
                current, lead = Block(number, lead, []), ""
                blocks.append(current)
            current.lines.append(line[4 if fence is None else fence :])
        else:
            current, lead = None, line.strip() or lead
            prose += [""] * (number - 1 - len(prose)) + [line]
    return blocks, "\n".join(prose)


def is_command(line: str) -> bool:
    words = line.removeprefix("$ ").split()
    while words and VARIABLE.fullmatch(words[0]):
        words = words[1:]
    return bool(words) and (words[0] in SHELL_WORDS or words[0].startswith("./"))


def commands_of(page: str) -> list[Command]:
    blocks, prose = split_page((ROOT / page).read_text(encoding="utf-8"))
    found = [command for block in blocks for first, lines in block.paragraphs() for command in commands_in(page, first, lines)]
    for match in re.finditer(r"(?<!`)`([^`]+)`(?!`)", prose):
        names_one = re.search(r"\.(py|sh)\b", match[1]) or match[1].startswith("make ")
        if names_one and is_command(match[1]):
            found.append(Command(page, prose[: match.start()].count("\n") + 1, match[1]))
    return found


def commands_in(page: str, first: int, lines: list[str]) -> list[Command]:
    """The commands of a paragraph: none if no line is one, and else every line but comments, so that an unknown one is noticed."""
    found, number = [], first
    for joined in "\n".join(lines).replace("\\\n", "\0").split("\n") if any(map(is_command, lines)) else []:
        text = joined.replace("\0", " ")
        if text.startswith("error: "):
            found[-1] = Command(page, found[-1].line, found[-1].text, text)
        elif not text.startswith("#"):
            found.append(Command(page, number, text.removeprefix("$ ")))
        number += 1 + joined.count("\0")
    return found


def files_of(page: str) -> dict[str, str]:
    """The files that a page shows: a block below a line that ends with a name in backticks and a colon, or that begins with the name in
    a comment. Commands in the block are not the file's."""
    found = {}
    for block in split_page((ROOT / page).read_text(encoding="utf-8"))[0]:
        name = FILE_ABOVE.search(block.lead) or FILE_WITHIN.match(block.lines[0])
        if name:
            of_file = [lines for _, lines in block.paragraphs() if not any(map(is_command, lines))]
            found[name[1]] = "\n\n".join("\n".join(lines) for lines in of_file) + "\n"
    return found


# -- running commands ---------------------------------------------------------------------------------------------------------

WRAPPERS = ("train.sh", "generate_and_eval.sh", "train_generate_and_eval.sh")
MODULES = ("async_rlhf.docstrings", "pytest")  # that `python -m` may name
PLACEHOLDERS = {
    "COMMAND…": "python online_dpo.py --config configs/onlinedpo_tiny.yml",
    "FLAGS…": "--model_name_or_path results/onlinedpo_tiny",
    "MODEL": "checkpoints/sft_docstrings",
    "GOLD": "async_rlhf.rewards.docstrings:gold",
    "[options]": "",
    "…": "",
}
PLACEHOLDERS |= {name.removesuffix("…"): value for name, value in PLACEHOLDERS.items() if name != "…"}
OUTPUTS = ("output_dir", "output_global_parent_dir", "dataset_path")
COLUMNS = "prompt completion chosen rejected question answer post summary title subreddit text".split()
SFT_MODEL = ROOT / "checkpoints" / "sft_docstrings"
cached_docstrings = functools.cache(docstrings)


class Workplace:
    """A folder to work in as in a checkout. With `dry`, scripts get --dry_run, and what earlier stages or the user would have put
    there has a stand-in. `files` are those that the page shows."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, files: dict[str, str], dry: bool = True):
        self.folder, self.patch, self.files, self.dry = folder, patch, files, dry
        for name in ("configs", "checkpoints"):
            if not (folder / name).exists():
                (folder / name).symlink_to(ROOT / name)
        patch.chdir(folder)
        patch.setattr(os, "environ", os.environ.copy())  # a script tells its trackers of the run there
        for name in ("SLURM_JOB_ID", "WANDB_RUN_ID", "ASYNC_RLHF_OUTPUT_LINK", "WORLD_SIZE", "RANK"):
            patch.delenv(name, raising=False)
        patch.setattr(async_rlhf.data, "docstrings", cached_docstrings)

    def run(self, text: str) -> None:
        """Run a command line. One of an unknown kind is an AssertionError."""
        words = []
        for word in shlex.split(text, comments=True):
            words += shlex.split(PLACEHOLDERS[word]) if word in PLACEHOLDERS else [word]
        while match := VARIABLE.fullmatch(words[0]):
            self.patch.setenv(match[1], match[2])
            words = words[1:]
        first, *rest = words
        if first == "python":
            self.python(*rest)
        elif words[:2] == ["accelerate", "launch"]:
            self.launch(rest[1:])
        elif first == "sbatch":
            self.patch.setenv("SLURM_JOB_ID", "42")
            self.wrapper(*rest[next(i for i, word in enumerate(rest) if word.endswith(".sh")) :])
        elif first.endswith(".sh"):
            self.wrapper(*words)
        elif first == "make":
            done = subprocess.run(["make", "-n", *rest], cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        elif first in TOOLS:
            assert (Path(sys.executable).parent / first).exists()
        else:
            assert first in PREPARATION, f"tests/test_docs.py knows no way to run {text!r}"

    def python(self, script: str, *arguments: str) -> None:
        if script == "-m":
            assert arguments[0] in MODULES and importlib.util.find_spec(arguments[0])
        elif script in self.files:
            runpy.run_path(script, run_name="__main__")
        elif script.startswith(("docs/", "benchmarks/")):
            assert (ROOT / script).is_file()  # tests of their own compare what they write
        else:
            assert (ROOT / script).is_file() and "/" not in script, f"no script {script}"
            self.main(Path(script).stem, *arguments)

    def main(self, script: str, *arguments: str) -> None:
        module = importlib.import_module(script)
        takes_dry_run = script not in ("demo", "tldr")
        if self.dry:
            self.put_what_is_named(script, arguments)
            arguments += ("--dry_run",) * (takes_dry_run and not {"--dry_run", "--help"} & {*arguments})
        self.patch.setattr(sys, "argv", [f"{script}.py", *arguments])
        if "--help" in arguments:
            with pytest.raises(SystemExit) as end:
                module.main()
            assert end.value.code == 0
        elif takes_dry_run:
            module.main()
        else:
            self.stages(module)

    def stages(self, module) -> None:
        """demo.py and tldr.py, with every stage as a dry run."""

        def run_stages(stages: dict[str, list[str]]) -> None:
            for script, config, *arguments in stages.values():
                self.main(Path(script).stem, "--config", config, *arguments)
            raise StopIteration

        self.patch.setattr(module, "run_stages", run_stages)
        self.patch.setattr(module, "ROOT", self.folder, raising=False)
        (self.folder / "model").symlink_to(SFT_MODEL)
        self.patch.setattr(module, "package_folder", lambda *_: self.folder, raising=False)  # its packages are no requirements
        self.patch.setattr(module, "unpack_smollm2", lambda *_: None, raising=False)
        with pytest.raises(StopIteration):
            module.main()

    def launch(self, words: list[str]) -> None:
        arguments = launch_command_parser().parse_args(words)
        processes = arguments.num_processes or load_config_from_file(arguments.config_file).num_processes
        self.patch.setenv("WORLD_SIZE", str(processes))
        self.patch.setenv("RANK", "0")
        self.patch.setattr(TrainingArguments, "_setup_devices", torch.device("cpu"))  # it would wait for the other processes
        self.python(arguments.training_script, *arguments.training_script_args)

    def wrapper(self, script: str, *arguments: str) -> None:
        name = Path(script).name
        assert name in WRAPPERS and os.access(ROOT / name, os.X_OK), f"no wrapper {script}"
        if name == "generate_and_eval.sh":
            self.main("generate_for_eval", *arguments)
            self.main("load_and_eval", *arguments)
        else:
            self.run(shlex.join(arguments))

    # -- stand-ins ----

    def put_what_is_named(self, script: str, arguments: tuple[str, ...]) -> None:
        """Models, data sets and files that the arguments and their YAML file name."""
        given = dict(flags(arguments))
        if "config" in given:
            self.put("config", given["config"], script)
            path = Path(given["config"])
            given = (yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}) | given
        for field, value in given.items():
            if isinstance(value, str):
                self.put(field, value, script)

    def put(self, field: str, value: str, script: str) -> None:
        path = self.folder / value.split(":")[0]
        is_result = value.startswith("results/")
        if path.exists() or field in OUTPUTS or not (is_result or path.parent == self.folder):
            return  # what would belong to the project stays missing
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.name in self.files:
            path.write_text(self.files[path.name], encoding="utf-8")
        elif path.suffix == ".jsonl":
            row = dict.fromkeys(COLUMNS, "Some words.") | {"summaries": ["long", "short"], "scores": [1.0, 0.0]}
            path.write_text("".join(json.dumps(row | {"number": i}) + "\n" for i in range(100)))
        elif path.suffix == ".yml":
            path.write_text("dataset_name: rows.jsonl\nmodel_name_or_path: checkpoints/sft_docstrings\n")
            self.put("dataset_name", "rows.jsonl", script)
        elif path.suffix == ".py":
            path.write_text(f"def {value.split(':')[1]}(samples):\n    return [0.0 for _ in samples]\n")
        elif is_result and field.endswith("dataset_name"):
            rows = [{"prompt": f"p{i}", "chosen": "c", "rejected": "r"} for i in range(100)]
            DatasetDict({"train": Dataset.from_list(rows)}).save_to_disk(path)
        elif is_result and field == "model_name_or_path" and script in ("generate_for_eval", "load_and_eval"):
            self.put_run(path)
        elif is_result and field.endswith(("model_path", "model_name_or_path", "reward")):
            path.symlink_to(SFT_MODEL)

    def put_run(self, path: Path) -> None:
        """What Online DPO leaves: its record and a checkpoint."""
        file = f"configs/{path.name}.yml"
        file = file if Path(file).exists() else "configs/onlinedpo_tiny.yml"
        config = parse(importlib.import_module("online_dpo").OnlineDPOConfig, ["--config", file])
        record_run(path, "OnlineDPO", asdict(config) | {"output_dir": str(path), "completions_per_update": 128})
        (path / "checkpoint-24").symlink_to(SFT_MODEL)


def flags(arguments: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for word, after in zip(arguments, [*arguments, ""][1:], strict=True):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            yield name, value if equals else after


def run_as_documented(place, command) -> None:
    """Run the command; where the page shows an error below it, that must be what it says."""
    if command.error is None:
        place.run(command.text)
    else:
        with pytest.raises(UserError) as raised:
            place.run(command.text)
        assert f"error: {raised.value}" == command.error


COMMANDS = [command for page in PAGES if page != RUN_FOR_REAL for command in commands_of(page)]


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_every_command_runs(command, tmp_path, monkeypatch):
    run_as_documented(Workplace(tmp_path, monkeypatch, files_of(command.page)), command)


PAGE = """
Text with `python a.py --x` and `make demo` and `a.py`.

    # comment
    python a.py --x 1 \\
        --y 2   # why
    $ X=1 ./b.sh

    key: value
    python: no

```python
def f(): ...
```

`c.yml` holds:

```
key: value
```

```bash
cd there
frobnicate it
error: no
```

    # d.py
    def g(): ...


    def h(): ...

    python d.py
"""


def test_commands_and_files_are_found_in_every_form(tmp_path, monkeypatch):
    monkeypatch.setattr("test_docs.ROOT", tmp_path)
    (tmp_path / "page.md").write_text(PAGE)
    assert [(command.line, " ".join(command.text.split()), command.error) for command in commands_of("page.md")] == [
        (5, "python a.py --x 1 --y 2 # why", None),
        (7, "X=1 ./b.sh", None),
        (23, "cd there", None),
        (24, "frobnicate it", "error: no"),
        (34, "python d.py", None),
        (2, "python a.py --x", None),
        (2, "make demo", None),
    ]
    assert files_of("page.md") == {"c.yml": "key: value\n", "d.py": "# d.py\ndef g(): ...\n\ndef h(): ...\n"}


UNKNOWN = ["frobnicate it", "python nothing.py", "./nothing.sh x", "python -m nothing", "make nothing", "hf download x"]


@pytest.mark.parametrize("text", UNKNOWN)
def test_what_is_no_command_of_ours_is_refused(text, tmp_path, monkeypatch):
    with pytest.raises(AssertionError):
        Workplace(tmp_path, monkeypatch, {}).run(text)


@pytest.mark.parametrize("named", ["--config configs/no_such.yml", "--config configs/rm_tiny.yml --model_name_or_path checkpoints/no"])
def test_what_belongs_to_the_project_has_no_stand_in(named, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="no_such|checkpoints/no"):
        Workplace(tmp_path, monkeypatch, {}).run(f"python reward_modeling.py {named}")


def test_the_plan_on_the_staleness_page_is_the_one_printed(tmp_path, monkeypatch, capsys):
    page = "docs/off_policy.md"
    (command,) = [command for command in commands_of(page) if "--dry_run" in command.text]
    shown = [line for block in split_page((ROOT / page).read_text(encoding="utf-8"))[0] for line in block.lines]
    shown = [line for line in shown if line.startswith(("batch: ", "run: ", "staleness: "))]
    Workplace(tmp_path, monkeypatch, {}).run(command.text)
    assert len(shown) == 3 and "\n".join(shown) in capsys.readouterr().out


# -- docs/configs.md ----------------------------------------------------------------------------------------------------------


@functools.cache
def make_configs():
    spec = importlib.util.spec_from_file_location("make_configs", ROOT / "docs" / "make_configs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_settings_page_is_that_of_the_help_strings():
    written = (ROOT / "docs" / "configs.md").read_text(encoding="utf-8")
    assert written == make_configs().page(), "docs/configs.md is not up to date: run `python docs/make_configs.py`"


@pytest.mark.parametrize("script", make_configs().SCRIPTS)
def test_every_setting_has_a_help_string(script):
    config = make_configs().script_classes()[script]
    without = [field.name for field in fields(config) if not field.metadata.get("help", "").strip()]
    assert without == []


def test_every_script_with_a_dry_run_is_on_the_settings_page():
    scripts = {path.stem for path in ROOT.glob("*.py") if re.search(r"\bdry_run\b|\brun_algorithm\b", path.read_text(encoding="utf-8"))}
    assert scripts == set(make_configs().SCRIPTS)


# -- what the pages list ------------------------------------------------------------------------------------------------------


def architecture_names() -> list[str]:
    """Files, folders (they end with a slash) and patterns that docs/architecture.md lists: the first column of its tables, relative to
    the folder that the line above the table names."""
    names, folder = [], ""
    for line in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            names += [folder + name for name in re.findall(r"`([^`]+)`", line.split(" | ")[0])]
        elif line.endswith(":"):
            where = re.search(r"`([\w/.]+/)`:$", line)
            folder = where[1] if where else ""
    return names


@functools.cache
def tracked_files() -> list[str]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else pytest.skip("not a git checkout")


def test_architecture_names_every_file():
    names = architecture_names()
    files = [file for file in tracked_files() if file.endswith((".py", ".sh", ".yml", ".yaml", ".md")) and not file.startswith("tests/")]
    unnamed = [file for file in files if not any(fnmatch(file, f"{name}*" if name.endswith("/") else name) for name in names)]
    assert unnamed == [], "docs/architecture.md says nothing of these"


def test_architecture_names_no_file_that_is_missing():
    missing = [name for name in architecture_names() if not any(ROOT.glob(name.rstrip("/")))]
    assert missing == []


IMPORT = re.compile(r"^\s*(?:from|import) (async_rlhf[\w.]*)(?: import (\w+))?", re.MULTILINE)


def test_a_module_imports_only_from_those_above_it():
    library, above = "src/async_rlhf/", set()
    for name in [name for name in architecture_names() if name.startswith(library)]:
        imports = IMPORT.findall((ROOT / name).read_text(encoding="utf-8"))
        imported = {f"{module}.{what}" if module == "async_rlhf" else module for module, what in imports}
        assert imported <= above, f"docs/architecture.md has {name} above something that it imports"
        above.add(name.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", "."))


@pytest.mark.parametrize("page", PAGES)
def test_links_and_files_named_on_a_page_are_there(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"https?:|mailto:", link)]
    assert [link for link in links if link and not (ROOT / page).parent.joinpath(link).exists()] == []
    named = re.findall(r"\b(?:configs|docs|checkpoints|src|tests)/[\w./*-]*\w", text)
    assert [name for name in named if not any(ROOT.glob(name))] == []


def test_headings_that_links_lead_to_are_there():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([\w./]*)#([\w-]+)\)", (ROOT / page).read_text(encoding="utf-8")):
            text = ((ROOT / page).parent / target if target else ROOT / page).read_text(encoding="utf-8")
            anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in re.findall(r"^#+ (.*)$", text, re.M)}
            assert anchor in anchors, f"{page}: {target}#{anchor}"


def test_every_gold_name_is_documented():
    ones, interval = np.ones((2, 1)), lambda values: [0.0, 1.0]
    result = summarize(Measured(ones, ones, ones, [[-1.0], [-1.0]], ones), ones, interval) | compare(ones, ones, interval)
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert [name for name in tracked_values(result) if f"`{name}`" not in text] == []
