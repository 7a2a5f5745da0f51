"""Data sets: load, template, tokenize, filter; and the prompt stream that training draws from.

One tokenization serves every script: a prompt's ids are made here once and are what SFT trains on, what the generator
gets and what a reward of the same vocabulary scores.
"""

import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict, disable_progress_bars, load_dataset, load_from_disk
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from async_rlhf import distributed
from async_rlhf.config import DataConfig, UserError, require
from async_rlhf.docstrings import docstrings
from async_rlhf.rollout import Prompt

FILE_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def load_split(config: DataConfig, split: str, columns: set[str] = frozenset()) -> Dataset:
    """`train_split` or `eval_split` (`split` is "train" or "eval"), at most `max_*_samples` rows of it.

    Raises:
        UserError: no such file, split or column (`columns` are the ones that the caller will read), or no row.
    """
    name = config.dataset_name if split == "train" else config.eval_dataset_name or config.dataset_name
    part = config.train_split if split == "train" else config.eval_split
    most = config.max_train_samples if split == "train" else config.max_eval_samples
    dataset = _load(name, config.dataset_config, part)
    require(len(dataset), f"dataset {name!r}, split {part!r}: it has no row")
    missing = sorted(columns - set(dataset.column_names))
    require(not missing, f"dataset {name!r}, split {part!r}: no column {', '.join(missing)}; it has {', '.join(dataset.column_names)}")
    return dataset.select(range(min(most, len(dataset)))) if most else dataset


def describe_split(config: DataConfig, split: str, columns: set[str]) -> tuple[str, int | None]:
    """For a dry run: a line on the rows of a split and their number, columns checked. What is on the hub is not fetched: None."""
    name = (config.eval_dataset_name if split == "eval" else None) or config.dataset_name
    if not is_local(name):
        return f"{split}: {name} on the hub, read when the run starts", None
    rows = len(load_split(config, split, columns))
    return f"{split}: {rows} rows of {name}", rows


def is_local(name: str) -> bool:
    """Whether a data-set name is a path or built in, rather than a hub name."""
    return name == "docstrings" or Path(name).exists() or Path(name).suffix in FILE_FORMATS or name.startswith((".", "/", "~"))


def _load(name: str, config_name: str | None, part: str) -> Dataset:
    path = Path(name).expanduser()
    try:
        if name == "docstrings":
            return _slice(docstrings(), part, name)
        if path.is_dir() and ((path / "dataset_dict.json").exists() or (path / "state.json").exists()):
            return _slice(load_from_disk(str(path)), part, name)
        if is_local(name) and not path.is_dir():
            require(path.is_file(), f"dataset_name {name!r}: no such file")
            require(path.suffix in FILE_FORMATS, f"dataset_name {name!r}: one of {', '.join(FILE_FORMATS)} is needed")
            return load_dataset(FILE_FORMATS[path.suffix], data_files={"train": str(path)}, split=part)
        return load_dataset(name, config_name, split=part)
    except UserError:
        raise
    except Exception as error:  # `datasets` raises many kinds: unknown split, no such hub name, no network, broken file
        raise UserError(f"dataset {name!r}, split {part!r}: {' '.join(str(error).split())}") from error


def _slice(dataset: Dataset | DatasetDict, part: str, name: str) -> Dataset:
    base, _, bounds = part.partition("[")
    if isinstance(dataset, DatasetDict):
        require(base in dataset, f"dataset {name!r}: no split {base!r}; it has {', '.join(dataset)}")
        dataset = dataset[base]
    if not bounds:
        return dataset
    try:
        start, stop = (
            round(float(bound[:-1]) / 100 * len(dataset)) if bound.endswith("%") else int(bound or default)
            for bound, default in zip(bounds.rstrip("]").split(":"), (0, len(dataset)), strict=True)
        )
    except ValueError as error:
        raise UserError(f"split {part!r}: slices are written split[start:stop], in rows or in percent") from error
    return dataset.select(range(*slice(start, stop).indices(len(dataset))))


class Encoder:
    """Turns rows into prompts and completions, as text and as token ids, by the settings of a `DataConfig`."""

    def __init__(self, config: DataConfig, tokenizer: PreTrainedTokenizerBase):
        self.config, self.tokenizer = config, tokenizer

    @staticmethod
    def prompt_columns(config: DataConfig) -> set[str]:
        return template_columns(config.prompt_template) or {config.prompt_column}

    @staticmethod
    def completion_columns(config: DataConfig) -> set[str]:
        return template_columns(config.completion_template) or {config.completion_column}

    def prompt_text(self, row: dict) -> str:
        """The prompt as the policy sees it, the chat template's marks included."""
        prompt = self._field(row, self.config.prompt_template, self.config.prompt_column)
        if self.config.chat_template and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, str):
            return prompt
        system = [{"role": "system", "content": self.config.system_prompt}] if self.config.system_prompt else []
        return self.tokenizer.apply_chat_template([*system, *prompt], add_generation_prompt=True, tokenize=False)

    def prompt_ids(self, row: dict) -> list[int]:
        return self.encode_prompt(self.prompt_text(row))

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids, with one BOS where the tokenizer writes one, also when a template has written it already."""
        ids = self.tokenizer(text, verbose=False)["input_ids"]
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]
        if len(ids) > 1 and ids[-1] == eos and not text.endswith(self.tokenizer.eos_token or ""):
            ids = ids[:-1]  # a tokenizer that ends every text (T5's way) would end the prompt
        return ids

    def completion_text(self, row: dict, column: str | None = None) -> str:
        """The reference completion, or that of another column (chosen, rejected)."""
        template = self.config.completion_template if column is None else None
        completion = self._field(row, template, column or self.config.completion_column)
        return completion if isinstance(completion, str) else completion[-1]["content"]

    def reference_text(self, row: dict) -> str | None:
        """`completion_text`, or None where the row has no text there."""
        template, column = self.config.completion_template, self.config.completion_column
        if template is None and not isinstance(row[column], str) and not (row[column] and isinstance(row[column][0], dict)):
            return None
        return None if any(row[name] is None for name in self.completion_columns(self.config)) else self.completion_text(row)

    def completion_ids(self, row: dict, column: str | None = None) -> list[int]:
        """Token ids of the completion, the end of sequence included."""
        return self.encode_completion(self.completion_text(row, column))

    def encode_completion(self, text: str, end: bool = True) -> list[int]:
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        eos = self.tokenizer.eos_token_id
        return ids if not end or ids[-1:] == [eos] else [*ids, eos]

    def _field(self, row: dict, template: str | None, column: str) -> Any:
        if template is not None:
            return fill_template(template, row)
        value = row[column]
        require(value is not None, f"column {column!r}: a row is null; its other columns: {str(row)[:200]}")
        return value


def template_columns(template: str | None) -> set[str]:
    """The fields of a template.

    Raises:
        UserError: no template, such as a brace that stands alone.
    """
    try:
        return {name for _, name, _, _ in string.Formatter().parse(template or "") if name}
    except ValueError as error:
        raise UserError(f"template {template!r}: {error}") from error


def fill_template(template: str, row: Mapping[str, Any]) -> str:
    """The template with its columns filled in from a row.

    Raises:
        UserError: a column that is null or not there.
    """
    null = sorted(name for name in template_columns(template) if name not in row or row[name] is None)
    require(not null, f"template {template!r}: column {', '.join(null)} of a row is null or not there; its columns: {str(row)[:200]}")
    return template.format_map(row)


@dataclass
class PromptData:
    """Rows whose prompts fit, their ids beside them: `ids[i]` is the prompt of `rows[i]`."""

    rows: Dataset
    ids: list[list[int]]
    dropped: int

    def __len__(self) -> int:
        return len(self.ids)


def load_prompts(config: DataConfig, encoder: Encoder, split: str, columns: set[str] = frozenset()) -> PromptData:
    """The prompts of a split, tokenized; those over `max_prompt_length` dropped and counted in print, or refused by row number.

    Raises:
        UserError: from `load_split`; an empty prompt; an overlong prompt with `overlong_prompts: error`; no prompt left.
    """
    rows = load_split(config, split, Encoder.prompt_columns(config) | columns)
    ids = [encoder.prompt_ids(row) for row in rows]
    empty = [i for i, prompt in enumerate(ids) if not prompt]
    require(not empty, f"{len(empty)} empty prompts, rows {empty[:10]}: a prompt needs at least one token")
    overlong = [i for i, prompt in enumerate(ids) if len(prompt) > config.max_prompt_length]
    refused = config.overlong_prompts == "error" and overlong
    require(not refused, f"{len(overlong)} prompts over max_prompt_length {config.max_prompt_length}, rows {overlong[:10]}")
    if overlong:
        kept = np.setdiff1d(np.arange(len(ids)), overlong)
        rows, ids = rows.select(kept), [ids[i] for i in kept]
    require(ids, f"every prompt is over max_prompt_length {config.max_prompt_length}")
    if distributed.is_main():
        print(f"{split} prompts: {len(ids)}, {len(overlong)} over max_prompt_length {config.max_prompt_length} dropped", flush=True)
    return PromptData(rows, ids, len(overlong))


class PromptStream:
    """The endless, shuffled order in which prompts are trained on. Position p is row `order(epoch)[p % n]` of epoch `p // n`.

    The order is a function of the seed and the epoch alone, so where training stands is one number, the position: nothing
    is skipped or repeated by a resume, an epoch's last prompts share a batch with the next epoch's first ones, and a data set
    smaller than a batch works.
    """

    def __init__(self, ids: list[list[int]], seed: int):
        require(ids, "no prompt to draw from")
        self._ids, self._seed = ids, seed
        self._order: tuple[int, np.ndarray] | None = None

    def take(self, position: int, count: int) -> list[Prompt]:
        """The prompts at positions `position … position + count − 1`."""
        rows = [(p, int(self._epoch(p // len(self._ids))[p % len(self._ids)])) for p in range(position, position + count)]
        return [Prompt(position=p, row=row, ids=self._ids[row]) for p, row in rows]

    def _epoch(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, np.random.default_rng([self._seed, epoch]).permutation(len(self._ids))
        return self._order[1]


def quiet_libraries() -> None:
    """No bars for loading and saving: the run's own bar is the one to watch."""
    disable_progress_bars()
    transformers_logging.disable_progress_bar()


def map_rows(dataset: Dataset, function: Callable[[dict], dict], description: str) -> Dataset:
    """`dataset.map` that drops the old columns and never reads a stale cache."""
    return dataset.map(function, remove_columns=dataset.column_names, load_from_cache_file=False, desc=description)
