"""What the benchmarks print, from runs that are tiny."""

import os

import pytest

from async_rlhf.config import UserError
from benchmarks.trainer import ALGORITHMS, COLUMNS, BenchmarkConfig, benchmark


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_trainer_benchmark_prints_seconds_rates_and_ratios_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table, facts = benchmark(BenchmarkConfig(shapes=["8+4"], k=[2], prompts=4, updates=2, threads=1, compare_trl=False)).split("\n\n")
    header, _, *rows = map(cells, table.splitlines())
    assert header == list(COLUMNS)
    rows = [dict(zip(header, row, strict=True)) for row in rows]
    assert [(row["algorithm"], row["path"]) for row in rows] == [
        (name, path) for name in ALGORITHMS.values() for path in ("shared", "plain")
    ]
    for row in rows:
        assert (row["tokens"], row["k"], row["update × TRL"]) == ("8+4", "2", "–")
        values = {name: float(row[name]) for name in COLUMNS[4:-1]}
        assert all(value > 0 for value in values.values())
        assert values["s an update"] > values["scoring"] + values["training"] - 0.002
        assert values["tokens/s"] == pytest.approx(values["completions/s"] * 4, rel=0.01, abs=0.6)
        assert row["path"] == "shared" or (values["training × plain"], values["update × plain"]) == (1, 1)
    assert f"{os.cpu_count()} cores, 1 threads, torch " in facts and "4 prompts an update" in facts
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(updates=1), "the first is not counted"),
        (dict(shapes=["64"]), "such as 64\\+32"),
        (dict(k=[1]), "k 2 or more"),
        (dict(k=[3], per_forward=64), "forwards all full"),
        (dict(algorithms=["ppo"]), "some of online_dpo, rloo"),
    ],
)
def test_the_trainer_benchmark_refuses_what_it_cannot_measure(changes, message):
    with pytest.raises(UserError, match=message):
        BenchmarkConfig(**changes)
