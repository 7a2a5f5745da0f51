"""Evaluation after training: the record of what checkpoints generated, and the numbers and pictures made from it.

`generate_for_eval.py` writes the record and `load_and_eval.py` reads it, the sampling settings included, so that both always
speak of the same completions. What the numbers mean is in docs/evaluation.md.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset, load_from_disk
from matplotlib.figure import Figure

from async_rlhf.config import require
from async_rlhf.evaluation_config import SAMPLING_FIELDS, SETTINGS_FILE, EvalSamplingConfig, read_settings
from async_rlhf.runs import CHECKPOINT

Interval = Callable[[np.ndarray], list[float]]

# -- the record of what was generated -----------------------------------------------------------------------------------------


@dataclass
class Generations:
    """A `datasets` folder, one row a prompt, with the settings that made it beside the rows, in generations.json.

    Columns: `row` (the data-set row), `prompt`, `prompt_ids`, `reference`, `reference_ids`, and one a checkpoint:
    `responses`, a list of {text, ids, finished}, and `kl_samples`, a list of {ids, logprobs}.
    """

    settings: dict
    rows: Dataset

    @property
    def checkpoints(self) -> list[str]:
        return list(self.settings["checkpoints"])

    def save(self, folder: Path) -> None:
        """Replaces an earlier record there; written beside its place first, so that it is whole or not there."""
        temporary = folder.with_name(f".{folder.name}.part")
        self.rows.save_to_disk(temporary)
        (temporary / SETTINGS_FILE).write_text(json.dumps(self.settings, indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)

    @classmethod
    def load(cls, folder: Path) -> "Generations":
        return cls(read_settings(folder), load_from_disk(str(folder)))


def check_replaceable(folder: Path) -> None:
    """Raise `UserError` if something other than generations stands where they are to be written."""
    require(not folder.exists() or (folder / SETTINGS_FILE).exists(), f"dataset_path {str(folder)!r} exists and holds no generations")


def check_recorded(config: EvalSamplingConfig, generations: Generations, folder: Path) -> None:
    """Raise `UserError` where the configuration speaks of other completions than were generated."""
    for name in SAMPLING_FIELDS:
        recorded, given = generations.settings["sampling"][name], getattr(config, name)
        require(given == recorded, f"{name} {given}: the generations in {str(folder)!r} were made with {recorded}; leave it out")


def check_comparable(ours: Generations, theirs: Generations) -> None:
    """Raise `UserError` unless both are completions of the same prompts, sampled alike."""
    for name in ("response_length", "temperature", "top_p", "top_k", "stop_token_ids"):
        a, b = ours.settings["sampling"][name], theirs.settings["sampling"][name]
        require(a == b, f"baseline_dataset_path: its {name} is {b}, that of the run {a}; generate one of them again")
    same = len(ours.rows) == len(theirs.rows) and ours.rows["prompt"][:] == theirs.rows["prompt"][:]
    require(
        same, f"baseline_dataset_path: its {len(theirs.rows)} prompts are not the run's {len(ours.rows)}; use the same split and template"
    )


# -- numbers: pure functions --------------------------------------------------------------------------------------------------


def win_shares(scores: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Share of wins (strictly greater) and of ties a prompt, `[prompts]` each, over every pair of the `scores [prompts, n]`
    with the `others [prompts, m]` of the same prompt."""
    difference = scores[:, :, None] - others[:, None, :]
    return (difference > 0).mean((1, 2)), (difference == 0).mean((1, 2))


def bootstrap_interval(values: np.ndarray, resamples: int, seed: int) -> list[float]:
    """95% percentile interval of the mean of `values [prompts]` when prompts are drawn anew with replacement (Efron 1979).

    Paired: a value holds everything about its prompt, a difference between two models as well, and the same seed draws the
    same prompts for every number.
    """
    draw = np.random.default_rng(seed)
    means = [values[draw.integers(len(values), size=len(values))].mean() for _ in range(resamples)]
    return [float(bound) for bound in np.percentile(means, [2.5, 97.5])]


def perplexity(logprobs: Iterable[Sequence[float]]) -> float:
    """exp(−Σ log p / number of tokens) over the tokens of all sequences: long ones count by their length."""
    tokens = np.concatenate([np.asarray(sequence, dtype=np.float64) for sequence in logprobs])
    return float(np.exp(-tokens.mean()))


def sequence_log_ratio(policy_logprobs: Sequence[float], reference_logprobs: Sequence[float]) -> float:
    """Σ (log π − log π_ref) over the tokens of a response, in nats. Its mean over responses drawn from π is an unbiased
    estimate of KL(π‖π_ref) of whole responses (k1 in Schulman 2020)."""
    return float(np.sum(np.asarray(policy_logprobs, dtype=np.float64) - np.asarray(reference_logprobs, dtype=np.float64)))


@dataclass
class Measured:
    """Everything measured of one checkpoint: gold `scores`, `lengths` in tokens and `finished`, `[prompts, n]` each; the SFT model's
    `sft_logprobs`, one sequence a response; and `log_ratios [prompts, kl_samples]` of the samples for the KL."""

    scores: np.ndarray
    lengths: np.ndarray
    finished: np.ndarray
    sft_logprobs: list[Sequence[float]] | None = None
    log_ratios: np.ndarray | None = None


def summarize(measured: Measured, reference_scores: np.ndarray, interval: Interval) -> dict:
    """The results of one checkpoint; `reference_scores: [prompts, 1]` are gold scores of the reference completions."""
    wins, ties = win_shares(measured.scores, reference_scores)
    scores = measured.scores.mean(1)
    kl = measured.log_ratios.mean(1) if measured.log_ratios is not None else None
    return {
        "win_rate": float(wins.mean()),
        "win_rate_ci": interval(wins),
        "tie_rate": float(ties.mean()),
        "score": float(scores.mean()),
        "score_ci": interval(scores),
        "reference_score": float(reference_scores.mean()),
        "perplexity": perplexity(measured.sft_logprobs) if measured.sft_logprobs is not None else None,
        "kl": float(kl.mean()) if kl is not None else None,
        "kl_ci": interval(kl) if kl is not None else None,
        "response_length": float(measured.lengths.mean()),
        "eos_rate": float(measured.finished.mean()),
    }


def compare(scores: np.ndarray, baseline: np.ndarray, interval: Interval) -> dict:
    """Head to head on the same prompts: `scores [prompts, n]` against those of the `baseline [prompts, m]`."""
    (wins, ties), (losses, _) = win_shares(scores, baseline), win_shares(baseline, scores)
    gain = scores.mean(1) - baseline.mean(1)
    return {
        "head_to_head": {
            "win_rate": float(wins.mean()),
            "ci": interval(wins),
            "tie_rate": float(ties.mean()),
            "lose_rate": float(losses.mean()),
            "net": float((wins - losses).mean()),
            "net_ci": interval(wins - losses),
        },
        "score_gain": {"mean": float(gain.mean()), "ci": interval(gain)},
    }


# -- what is shown ------------------------------------------------------------------------------------------------------------


def write_results(results: dict, samples: Iterable[dict], folder: Path) -> None:
    """results.json, results.md, gold_against_kl.png, and samples.jsonl, what each checkpoint said and what it scored."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    (folder / "results.md").write_text(markdown_table(results), encoding="utf-8")
    draw(results, folder / "gold_against_kl.png")
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples), encoding="utf-8")


def tracked_values(result: dict) -> dict[str, float]:
    """`gold/*` of one checkpoint, as `summarize` and `compare` gave it."""
    names = ("win_rate", "tie_rate", "score", "reference_score", "perplexity", "kl", "response_length", "eos_rate")
    values = {name: result[name] for name in names}
    if "head_to_head" in result:
        values |= {"baseline_win_rate": result["head_to_head"]["win_rate"], "score_gain": result["score_gain"]["mean"]}
    return {f"gold/{name}": value for name, value in values.items() if value is not None}


def markdown_table(results: dict) -> str:
    """One line a checkpoint, the baseline's first; intervals in brackets."""
    columns = {
        "checkpoint": lambda name, r: name,
        "wins against reference": lambda name, r: _with_interval(r["win_rate"], r["win_rate_ci"]),
        "ties": lambda name, r: _number(r["tie_rate"]),
        "gold score": lambda name, r: _with_interval(r["score"], r["score_ci"]),
        "KL to SFT (nats)": lambda name, r: _with_interval(r["kl"], r["kl_ci"]),
        "perplexity": lambda name, r: _number(r["perplexity"]),
        "length": lambda name, r: f"{r['response_length']:.1f}",
        "EOS": lambda name, r: _number(r["eos_rate"]),
    }
    if results["baseline"]:
        columns |= {
            "wins / ties / losses against baseline": lambda name, r: _head_to_head(r.get("head_to_head")),
            "wins − losses": lambda name, r: _with_interval(*_pick(r.get("head_to_head"), "net", "net_ci")),
            "score gain": lambda name, r: _with_interval(*_pick(r.get("score_gain"), "mean", "ci")),
        }
    rows = {f"{name} (baseline)": r for name, r in results["baseline"].items()} | results["checkpoints"]
    lines = [list(columns), ["---"] * len(columns)]
    lines += [[cell(name, r) for cell in columns.values()] for name, r in rows.items()]
    reference = next(iter(results["checkpoints"].values()))["reference_score"]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return (
        f"{table}\n\n{results['prompts']} prompts; gold score of the reference completions {_number(reference)}. Brackets: 95% intervals.\n"
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:z.3f}"


def _with_interval(value: float | None, bounds: Sequence[float] | None) -> str:
    return _number(value) if bounds is None else f"{value:z.3f} [{bounds[0]:z.3f}, {bounds[1]:z.3f}]"


def _head_to_head(result: dict | None) -> str:
    return " / ".join(_number(value) for value in _pick(result, "win_rate", "tie_rate", "lose_rate"))


def _pick(result: dict | None, *names: str) -> list:
    return [result[name] if result else None for name in names]


def draw(results: dict, path: Path) -> None:
    """Gold win rate and gold score against the KL to the SFT model, a point a checkpoint; without a KL, in the order of training."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    runs = results["checkpoints"]
    with_kl = all(r["kl"] is not None for r in [*runs.values(), *results["baseline"].values()])
    levels = {"win_rate": (0.5, "one win in two"), "score": (next(iter(runs.values()))["reference_score"], "the references' own")}
    labels = {"win_rate": "gold win rate against the reference", "score": "gold score"}
    for axes, key in zip(figure.subplots(1, 2), labels, strict=True):
        for names, style in ((runs, {"fmt": "o-", "label": "checkpoints"}), (results["baseline"], {"fmt": "s", "label": "baseline"})):
            if not names:
                continue
            at = [r["kl"] if with_kl else update_of(name) for name, r in names.items()]
            width = _error_bars(list(names.values()), "kl") if with_kl else None
            height = _error_bars(list(names.values()), key)
            axes.errorbar(at, [r[key] for r in names.values()], height, width, capsize=3, elinewidth=0.8, **style)
            for x, (name, r) in zip(at, names.items(), strict=True):
                axes.annotate(name.removeprefix("checkpoint-"), (x, r[key]), xytext=(5, 5), textcoords="offset points", fontsize=8)
        level, meaning = levels[key]
        axes.axhline(level, linestyle="--", color="grey", label=meaning)
        axes.set_xlabel("KL to the SFT model, nats a response" if with_kl else "update")
        axes.set_ylabel(labels[key])
        axes.legend()
    figure.savefig(path, dpi=150)


def update_of(name: str) -> int:
    """The update of `checkpoint-<update>`; 0 for a model of another name."""
    match = CHECKPOINT.fullmatch(name)
    return int(match[1]) if match else 0


def _error_bars(results: list[dict], key: str) -> list[list[float]]:
    return [[abs(r[key] - r[f"{key}_ci"][side]) for r in results] for side in (0, 1)]
