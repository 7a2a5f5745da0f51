"""Metrics: means weighted by what they count over ranks and accumulation steps, timers, metrics.jsonl, trackers."""

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from async_rlhf import distributed
from async_rlhf.losses import effective_sample_share, importance_stats


class Metrics:
    """What one update observes. `reduce` gives the values over all ranks; a name that saw nothing is left out."""

    def __init__(self):
        self._sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._squares: dict[str, float] = defaultdict(float)
        self._maxima: dict[str, float] = {}
        self._log_weights: dict[str, list[float]] = defaultdict(list)

    def mean(self, name: str, total: torch.Tensor | float, count: torch.Tensor | float) -> None:
        """Adds `total`, a sum over `count` items, to the mean of all items."""
        self._sums[name][0] += float(total)
        self._sums[name][1] += float(count)

    def observe(self, name: str, values: torch.Tensor | Iterable[float], std_name: str | None = None) -> None:
        """Adds every value to the mean; `std_name` also logs their standard deviation."""
        values = torch.as_tensor(values, dtype=torch.float64)
        self.mean(name, values.sum(), values.numel())
        if std_name:
            self._squares[f"{name} {std_name}"] += float(values.square().sum())

    def maximum(self, name: str, value: torch.Tensor | float) -> None:
        self._maxima[name] = max(float(value), self._maxima.get(name, float("-inf")))

    def effective_samples(self, name: str, log_weights: torch.Tensor) -> None:
        """Adds importance weights, `[n]` logarithms, whose effective sample share is logged."""
        self._log_weights[name] += log_weights.flatten().tolist()

    def reduce(self) -> dict[str, float]:
        ranks = distributed.all_gather((dict(self._sums), dict(self._squares), self._maxima, dict(self._log_weights)))
        values: dict[str, float] = {}
        for name in sorted({name for rank in ranks for name in rank[0]}):
            total, count = (sum(rank[0].get(name, (0.0, 0.0))[i] for rank in ranks) for i in (0, 1))
            if count:
                values[name] = total / count
                for key in {key for rank in ranks for key in rank[1] if key.split()[0] == name}:
                    square = sum(rank[1].get(key, 0.0) for rank in ranks) / count
                    values[key.split()[1]] = max(0.0, square - values[name] ** 2) ** 0.5
        for name in {name for rank in ranks for name in rank[2]}:
            values[name] = max(rank[2][name] for rank in ranks if name in rank[2])
        for name in {name for rank in ranks for name in rank[3]}:
            weights = torch.tensor([w for rank in ranks for w in rank[3].get(name, [])], dtype=torch.float64)
            values[name] = float(effective_sample_share(weights))
        return values


def policy_metrics(metrics: Metrics, logprobs: torch.Tensor, behaviour: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`policy/*`: the policy that trains against the one that sampled, `[…, R]` each. Gives the sum of `policy/approx_kl`."""
    logprobs = logprobs.detach()
    stats = importance_stats(logprobs, behaviour, mask)
    tokens = mask.sum()
    metrics.mean("policy/ratio_mean", stats["ratio"][mask].sum(), tokens)
    metrics.mean("policy/approx_kl", stats["approx_kl"][mask].sum(), tokens)
    if tokens:
        metrics.maximum("policy/ratio_max", stats["ratio"][mask].max())
    metrics.effective_samples("policy/ess", stats["sequence_log_ratio"])
    return stats["approx_kl"][mask].sum()


class Timers:
    """Seconds by name since the last `take`."""

    def __init__(self):
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name] += seconds

    def take(self) -> dict[str, float]:
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds


def append_json(path: Path, record: dict) -> None:
    """One line more in a JSONL file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
