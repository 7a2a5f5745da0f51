"""Long work in numbered parts that survives a stop: every part is one file, whole or absent, in a folder that knows its settings."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, Features
from datasets.arrow_writer import ArrowWriter
from tqdm import tqdm

from async_rlhf.config import require

PART = re.compile(r"part-(\d+)\.jsonl")
SETTINGS_FILE = "settings.json"


class Parts:
    """The work folder: `part-<number>.jsonl`, JSON objects one a line, and settings.json, what the parts were made with.

    One run at a time writes there. Numbers count from 0; parts may be written and missing in any order.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def check(self, settings: dict[str, Any]) -> None:
        """Look whether the folder's parts, if there are any, fit `settings` (what JSON can hold). Changes nothing.

        Raises:
            UserError: the folder is another's, or one of `settings` is not what the parts were made with; it names the setting.
        """
        if not self.folder.exists():
            return
        path = self.folder / SETTINGS_FILE
        require(path.is_file(), f"{str(self.folder)!r} exists and holds no {SETTINGS_FILE}, so it is no work folder: move or delete it")
        recorded = json.loads(path.read_text(encoding="utf-8"))
        for name, now in json.loads(json.dumps(settings)).items():
            then = recorded.get(name)
            require(
                now == then,
                f"{name}: {now!r} now, {then!r} when the parts in {str(self.folder)!r} were made; "
                "go back to that, or delete that folder, or name a new output_dir",
            )

    def open(self, settings: dict[str, Any]) -> None:
        """Make the folder, or `check` the one that is there."""
        self.check(settings)
        if not self.folder.exists():
            self.folder.mkdir(parents=True)
            _write_whole(self.folder / SETTINGS_FILE, [json.dumps(settings, indent=2)])

    def done(self) -> list[int]:
        """Numbers of the parts that are there, ascending."""
        names = os.listdir(self.folder) if self.folder.exists() else []
        return sorted(int(match[1]) for match in map(PART.fullmatch, names) if match)

    def missing(self, total: int, size: int) -> dict[int, range]:
        """Of the items 0 … total − 1 in chunks of `size`: number and items of each chunk that has no part yet."""
        done = set(self.done())
        return {n: range(n * size, min((n + 1) * size, total)) for n in range(-(-total // size)) if n not in done}

    def fill(self, total: int, size: int, work: Callable[[range], list[dict]], unit: str, show: Callable[[list[dict]], dict]) -> None:
        """Write every missing part: the records that `work` returns for the items of its chunk.

        The bar counts items, and stands at once where an earlier run stopped; `unit` is what they are called, `show` gives the numbers
        beside the bar from the newest records. What `work` raises ends it, with a note that says at which items.
        """
        missing = self.missing(total, size)
        done = total - sum(map(len, missing.values()))
        with tqdm(total=total, initial=done, unit=f" {unit}", mininterval=1.0) as bar:
            for number, items in missing.items():
                try:
                    records = work(items)
                except BaseException as error:
                    error.add_note(f"in {unit} {items[0]} to {items[-1]}; the same command continues from {str(self.folder)!r}")
                    raise
                self.write(number, records)
                if records:
                    bar.set_postfix(show(records), refresh=False)
                bar.update(len(items))

    def write(self, number: int, records: Iterable[dict]) -> None:
        _write_whole(self._path(number), map(json.dumps, records))

    def read(self) -> Iterator[dict]:
        """The records of all parts, in order, one part open at a time."""
        for number in self.done():
            with self._path(number).open(encoding="utf-8") as file:
                yield from map(json.loads, file)

    def assemble(self, rows: Iterable[dict], features: Features, output: Path) -> None:
        """Save `rows`, made from the parts, as the split train of a data set `output`, and delete the folder.

        Few rows are in memory at a time; `output` is whole or absent.
        """
        table, whole = self.folder / "rows.arrow", self.folder / "dataset"
        shutil.rmtree(whole, ignore_errors=True)  # what an earlier try left when it was stopped
        with ArrowWriter(features=features, path=str(table)) as writer:
            for row in rows:
                writer.write(row)
            writer.finalize()
        DatasetDict({"train": Dataset.from_file(str(table))}).save_to_disk(whole)
        whole.rename(output)
        shutil.rmtree(self.folder)

    def _path(self, number: int) -> Path:
        return self.folder / f"part-{number:06d}.jsonl"


def _write_whole(path: Path, lines: Iterable[str]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())  # or a power cut could leave the new name with no content
    temporary.replace(path)


def digest(rows: Dataset) -> str:
    """16 hex digits of a hash of the rows' values, in order: the same for the same rows, wherever they were loaded from."""
    sha = hashlib.sha256()
    for table in rows.with_format("arrow").iter(1000):  # as stored: an image or a sound is not decoded
        sha.update(repr(table.to_pylist()).encode("utf-8", "surrogatepass"))
    return sha.hexdigest()[:16]
