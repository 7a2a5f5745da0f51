"""Judge what `generate_for_eval.py` generated: gold win rate against the reference and a baseline, KL, perplexity.

    python load_and_eval.py --config configs/evaluate_tiny.yml --model_name_or_path results/onlinedpo_tiny \\
        --baseline_dataset_path results/sft_generations_tiny

Writes results.json, results.md, samples.jsonl and gold_against_kl.png; docs/evaluation.md says what each number is. Sampling settings
come from the record beside the generations (another value is refused), the SFT model's name and the trackers from the run's
run_config.json: `gold/*` goes to the run's own page, at the update of each checkpoint.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from tqdm import tqdm

from async_rlhf.config import require, run_script
from async_rlhf.data import quiet_libraries
from async_rlhf.evaluation import (
    Generations,
    Measured,
    bootstrap_interval,
    check_comparable,
    check_recorded,
    compare,
    markdown_table,
    sequence_log_ratio,
    summarize,
    tracked_values,
    update_of,
    write_results,
)
from async_rlhf.evaluation_config import SETTINGS_FILE, SFT, TRACKER_FIELDS, EvaluateConfig, generations_folder, parse_evaluate_config
from async_rlhf.models import Policy, check_model_path, load_causal_lm, load_tokenizer, pad_tokens
from async_rlhf.rewards import RewardContext, Sample, load_rewards, read_rewards
from async_rlhf.rewards.model import same_vocabulary
from async_rlhf.runs import run_folder, run_settings
from async_rlhf.trackers import log_past, log_table, open_trackers, wanted

SETTINGS = ["gold_reward_model_path", "sft_model_path", "baseline_dataset_path", "torch_dtype", "bootstrap_samples", "seed"]
TABLE_ROWS = 32


def main() -> None:
    config = parse_evaluate_config()
    quiet_libraries()
    folder = generations_folder(config.dataset_path, config.model_name_or_path)
    read_rewards([config.gold_reward_model_path], "gold_reward_model_path")
    if config.sft_model_path:
        check_model_path(config.sft_model_path, "sft_model_path")
    if config.dry_run and not (folder / SETTINGS_FILE).exists():
        print(f"{config.gold_reward_model_path} will judge what generate_for_eval.py puts in {folder}; nothing is there yet")
        return
    record = Generations.load(folder)
    check_recorded(config, record, folder)
    baseline = Generations.load(Path(config.baseline_dataset_path).expanduser()) if config.baseline_dataset_path else None
    if baseline:
        check_comparable(record, baseline)
    elif SFT in record.checkpoints[:-1]:
        baseline = record
    output = Path(config.output_dir or Path(config.model_name_or_path) / "_evaluation").expanduser()
    if config.dry_run:
        against = f"the reference and {baseline_name(record, baseline)}" if baseline else "the reference"
        print(
            f"{len(record.rows)} prompts × {config.num_generations} completions of {', '.join(record.checkpoints)}, judged by "
            f"{config.gold_reward_model_path} against {against}, KL and perplexity from {config.sft_model_path}; results in {output}"
        )
        return
    results, samples = evaluate(config, record, baseline)
    write_results(results, [sample for rows in samples.values() for sample in rows], output)
    track(config, results, samples)
    print(f"{markdown_table(results)}\nresults.json, results.md, samples.jsonl and gold_against_kl.png are in {output}")


def evaluate(config: EvaluateConfig, record: Generations, baseline: Generations | None) -> tuple[dict, dict[str, list[dict]]]:
    """What results.json holds: the settings, and results by checkpoint, the baseline's beside them. And by checkpoint, what it said."""
    judges = Judges(config, record, baseline)
    interval = partial(bootstrap_interval, resamples=config.bootstrap_samples, seed=config.seed)
    reference = judges.score_references(record)
    results = {
        "settings": {name: getattr(config, name) for name in SETTINGS} | {"generations": record.settings},
        "prompts": len(record.rows),
        "baseline": {},
        "checkpoints": {},
    }
    other = baseline_name(record, baseline) if baseline else None
    if baseline:
        theirs = judges.measure(baseline, other)
        results["baseline"][other] = summarize(theirs, reference, interval)
    samples = {}
    for name in record.checkpoints:
        if baseline is record and name == other:
            continue
        measured = judges.measure(record, name)
        results["checkpoints"][name] = summarize(measured, reference, interval)
        if baseline:
            results["checkpoints"][name] |= compare(measured.scores, theirs.scores, interval)
        samples[name] = list(describe_samples(record, name, measured.scores[:, 0], reference[:, 0]))
    return results, samples


def baseline_name(record: Generations, baseline: Generations) -> str:
    return SFT if baseline is record else baseline.checkpoints[-1]


def describe_samples(record: Generations, name: str, scores: np.ndarray, reference_scores: np.ndarray) -> Iterator[dict]:
    """The first completion of every prompt beside the reference, with what both scored."""
    rows = record.rows.select_columns(["prompt", "reference", name])
    for row, score, reference_score in zip(rows, scores.tolist(), reference_scores.tolist(), strict=True):
        said = {"checkpoint": name, "prompt": row["prompt"], "response": row[name]["responses"][0]["text"], "score": score}
        yield {**said, "reference": row["reference"], "reference_score": reference_score}


def track(config: EvaluateConfig, results: dict, samples: dict[str, list[dict]]) -> None:
    """Log `gold/*` to the training run itself, each checkpoint at its update."""
    trackers = wanted(config.report_to)
    if not trackers:
        return
    trained = run_settings(config.model_name_or_path)
    if config.wandb_run_id in (None, "slurm"):
        config.wandb_run_id = trained.get("wandb_run_id")
    accelerator = Accelerator(log_with=trackers, project_dir=run_folder(config.model_name_or_path) or config.model_name_or_path)
    open_trackers(accelerator, {name: getattr(config, name) for name in TRACKER_FIELDS}, resume=True)
    for name, result in results["checkpoints"].items():
        update = update_of(name)
        values = tracked_values(result) | {"episode": update * trained.get("completions_per_update", 0)}
        log_past(accelerator, values, update)
        log_table(accelerator, "gold/samples", samples[name][:TABLE_ROWS], update, past=True)
    accelerator.end_training()


class Judges:
    """The gold reward, and the SFT model that perplexity and KL refer to.

    Raises:
        UserError: the baseline or the SFT model has another vocabulary than the run, so that token ids mean something else there.
    """

    def __init__(self, config: EvaluateConfig, record: Generations, baseline: Generations | None):
        self.config = config
        tokenizer = load_tokenizer(config)
        others = {"baseline_dataset_path": baseline and baseline.settings["tokenizer"], "sft_model_path": config.sft_model_path}
        for field, path in others.items():
            same = path is None or same_vocabulary(tokenizer, load_tokenizer(replace(config, tokenizer_name_or_path=path)))
            require(same, f"{field}: the vocabulary at {path!r} is not the run's, so token ids cannot be compared")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.pad_id = tokenizer.pad_token_id
        self._scores: dict[tuple, float] = {}
        dtype = getattr(torch, config.torch_dtype, torch.float32)
        context = RewardContext(device, tokenizer, config.batch_size, dtype, config.trust_remote_code)
        self.gold = load_rewards([config.gold_reward_model_path], "gold_reward_model_path", context)
        self.sft = Policy(load_causal_lm(config, config.sft_model_path).to(device)).eval() if config.sft_model_path else None

    def score_references(self, record: Generations) -> np.ndarray:
        """Gold scores `[prompts, 1]` of the reference completions, as they are: whole, however long."""
        rows = record.rows.select_columns(["reference", "reference_ids"])
        return self._score(record, [[{"text": row["reference"], "ids": row["reference_ids"], "finished": True}] for row in rows])

    def measure(self, record: Generations, name: str) -> Measured:
        prompts, column = record.rows["prompt_ids"][:], record.rows[name][:]
        responses, samples = ([row[kind] for row in column] for kind in ("responses", "kl_samples"))
        return Measured(
            scores=self._score(record, responses),
            lengths=np.array([[len(response["ids"]) for response in group] for group in responses]),
            finished=np.array([[response["finished"] for response in group] for group in responses]),
            sft_logprobs=self._sft_logprobs(f"{name}: perplexity", prompts, responses, temperature=1.0) if self.sft else None,
            log_ratios=self._log_ratios(record, name, prompts, samples) if self.sft and samples[0] else None,
        )

    def _score(self, record: Generations, responses: list[list[dict]]) -> np.ndarray:
        """Gold scores, as `responses` is shaped. What two checkpoints both say is scored once, so that it ties: a model's score of
        it would differ in the last digits with the batch that it stands in."""
        rows = record.rows.select_columns(["row", "prompt", "prompt_ids", "reference"])
        new: dict[tuple, Sample] = {}
        for i, (row, group) in enumerate(zip(rows, responses, strict=True)):
            for said in group:
                if (key := (i, *said["ids"])) not in self._scores:
                    columns, own = row["row"], row["reference"]
                    sample = Sample(row["prompt"], said["text"], row["prompt_ids"], said["ids"], said["finished"], columns, i, own)
                    new[key] = sample
        if new:
            scores = self.gold.score(list(new.values())).total
            self._scores.update(zip(new, scores.tolist(), strict=True))
        return np.array([[self._scores[i, *said["ids"]] for said in group] for i, group in enumerate(responses)])

    def _log_ratios(self, record: Generations, name: str, prompts: list[list[int]], samples: list[list[dict]]) -> np.ndarray:
        """Log-ratios to the SFT model, `[prompts, kl_samples]`, at the temperature that these samples were drawn at."""
        temperature = record.settings["sampling"]["kl_temperature"]  # the baseline's may be another
        reference = iter(self._sft_logprobs(f"{name}: KL", prompts, samples, temperature))
        return np.array([[sequence_log_ratio(sample["logprobs"], next(reference)) for sample in group] for group in samples])

    @torch.no_grad()
    def _sft_logprobs(self, what: str, prompts: list[list[int]], responses: list[list[dict]], temperature: float) -> list[list[float]]:
        """The SFT model's log-probability of every token: one list a response, in the order of prompts, then samples."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        logprobs: dict[int, list[list[float]]] = {}
        for start in tqdm(range(0, len(order), self.config.batch_size), what):
            chunk = order[start : start + self.config.batch_size]
            ids = [[response["ids"] for response in responses[i]] for i in chunk]
            tokens = pad_tokens([prompts[i] for i in chunk], ids, self.pad_id)
            values = self.sft(**{key: tensor.to(self.sft.model.device) for key, tensor in tokens.items()}, temperature=temperature).tolist()
            for i, groups, rows in zip(chunk, ids, values, strict=True):
                logprobs[i] = [row[: len(response)] for response, row in zip(groups, rows, strict=True)]
        return [row for i in range(len(prompts)) for row in logprobs[i]]


if __name__ == "__main__":
    run_script(main)
