"""The built-in data set *docstring TL;DR*: a function's code in, the one-line summary that its author wrote out.

Every Python installation holds thousands of such functions. They are read with `ast` from the standard library and from
packages that the requirements pin, so the data set needs no download and is the same for the same versions: every run
records its fingerprint.
"""

import ast
import gc
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from datasets import Dataset, DatasetDict, load_from_disk
from tqdm import tqdm

PACKAGES = (
    "accelerate",
    "aiohttp",
    "datasets",
    "fastapi",
    "fsspec",
    "huggingface_hub",
    "matplotlib",
    "networkx",
    "numpy",
    "pandas",
    "peft",
    "pydantic",
    "ray",
    "sympy",
    "tokenizers",
    "torch",
    "transformers",
    "trl",
)
# By Python version, with the pinned requirements. Another Python gives other rows, in the same splits.
KNOWN_FINGERPRINTS = {"3.11.7": "53d995be9637c95e"}
VALIDATION_SHARE = 0.08
SKIPPED_PARTS = {"models", "test", "tests", "testing", "site-packages", "idlelib", "lib2to3", "__pycache__", "_vendor", "vendor"}
CODE_CHARACTERS = (40, 420)
SUMMARY_WORDS = (3, 14)
SUMMARY = re.compile(r"[A-Z][a-z]+ [^\n]*[A-Za-z0-9`')]\.")
FORMAT_VERSION = 1


def docstrings(cache_dir: str | os.PathLike | None = None) -> DatasetDict:
    """The splits `train` and `validation`, harvested once and cached. Columns: `module`, `name`, `code` and `summary`, and
    what the scripts read by default, `prompt` (the code and a marker) and `completion` (the summary).

    A row's split is drawn from a hash of its source file, so functions of one file never stand on both sides and a
    row stays in its split when packages change.
    """
    folder = _cache_folder(cache_dir)
    if not folder.exists():
        splits = _harvest()
        temporary = folder.with_name(f"{folder.name}.{os.getpid()}")
        splits.save_to_disk(temporary)
        (temporary / "fingerprint").write_text(_digest(splits))
        try:
            temporary.rename(folder)
        except OSError:  # another process was first; its result is the same
            if not folder.exists():
                raise
    return load_from_disk(str(folder)).map(
        lambda row: {"prompt": f"{row['code']}\n# TL;DR:", "completion": f" {row['summary']}"}, load_from_cache_file=False
    )


def fingerprint(cache_dir: str | os.PathLike | None = None) -> str:
    """16 hex digits over every row of every split, in order: what `KNOWN_FINGERPRINTS` lists and every run records."""
    docstrings(cache_dir)
    return (_cache_folder(cache_dir) / "fingerprint").read_text()


def _cache_folder(cache_dir: str | os.PathLike | None) -> Path:
    root = Path(cache_dir or os.environ.get("ASYNC_RLHF_CACHE", Path.home() / ".cache" / "async_rlhf"))
    return root / f"docstrings-{_versions_key()}"


def _digest(splits: DatasetDict) -> str:
    digest = hashlib.sha256()
    for split in sorted(splits):
        for row in splits[split]:
            digest.update(json.dumps([split, row["module"], row["name"], row["code"], row["summary"]]).encode())
    return digest.hexdigest()[:16]


def _versions_key() -> str:
    versions = {name: importlib.metadata.version(name) for name in _installed()}
    key = json.dumps([FORMAT_VERSION, platform.python_version(), versions], sort_keys=True)
    return hashlib.sha256(key.encode()).hexdigest()[:12]


def _installed() -> list[str]:
    return [name for name in PACKAGES if importlib.util.find_spec(name) is not None]


def _harvest() -> DatasetDict:
    rows: dict[str, list[dict]] = {"train": [], "validation": []}
    seen: set[str] = set()
    files = list(_source_files())
    with ProcessPoolExecutor(min(8, os.cpu_count() or 1), get_context("spawn"), initializer=gc.disable) as pool:
        found = pool.map(_read_functions, [path for _, path in files], chunksize=32)
        for (module, _), functions in zip(files, tqdm(found, "reading docstrings", len(files), unit="file"), strict=True):
            held_out = int(hashlib.sha256(module.encode()).hexdigest(), 16) % 10_000 < VALIDATION_SHARE * 10_000
            for name, code, summary in functions:
                keys = {"code " + code, "summary " + summary.lower()}
                if keys & seen:
                    continue
                seen |= keys
                row = {"module": module, "name": name, "code": code, "summary": summary}
                rows["validation" if held_out else "train"].append(row)
    return DatasetDict({split: Dataset.from_list(kept) for split, kept in rows.items()})


def _source_files() -> Iterator[tuple[str, Path]]:
    """(dotted module name, path), sorted, standard library first."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    roots = [("", stdlib)]
    for package in _installed():
        locations = importlib.util.find_spec(package).submodule_search_locations
        roots += [(package, Path(location)) for location in locations or []]
    for prefix, root in roots:
        for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
            parts = path.relative_to(root).with_suffix("").parts
            if SKIPPED_PARTS.isdisjoint(parts) and not any(part.startswith("test_") for part in parts):
                yield ".".join(([prefix] if prefix else []) + list(parts)), path


def _read_functions(path: Path) -> list[tuple[str, str, str]]:
    try:
        text = path.read_text(encoding="utf-8")
        return list(_functions(ast.parse(text))) if '"""' in text or "'''" in text else []
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return []  # templates and files for other Pythons


def _functions(node: ast.AST) -> Iterator[tuple[str, str, str]]:
    """(name, code without its docstring, summary line) of the functions that stand in modules, classes and functions."""
    for child in getattr(node, "body", []):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            summary = (ast.get_docstring(child) or "").split("\n\n")[0].strip()
            if _is_summary(summary) and len(child.body) > 1:
                child.body = child.body[1:]
                child.decorator_list = []
                code = ast.unparse(child)
                if CODE_CHARACTERS[0] <= len(code) <= CODE_CHARACTERS[1] and code.isascii():
                    yield child.name, code, summary
            yield from _functions(child)
        elif isinstance(child, ast.ClassDef | ast.If | ast.Try):
            yield from _functions(child)


def _is_summary(text: str) -> bool:
    fewest, most = SUMMARY_WORDS
    return fewest <= len(text.split()) <= most and text.isascii() and SUMMARY.fullmatch(text) is not None


if __name__ == "__main__":
    print("docstrings", fingerprint())
