"""Judge what `generate_for_eval.py` generated: gold win rate against the reference and a baseline, KL, perplexity.

    python load_and_eval.py --config configs/evaluate_tiny.yml --model_name_or_path results/onlinedpo_tiny \\
        --baseline_dataset_path results/sft_generations_tiny

Writes results.json, results.md and gold_against_kl.png; docs/evaluation.md says what each number is. Sampling settings come from
the record beside the generations (another value is refused), the SFT model's name from the run's run_config.json.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from async_rlhf.config import ModelConfig, require, run_script, setting
from async_rlhf.data import quiet_libraries
from async_rlhf.evaluation import (
    EvalSamplingConfig,
    Generations,
    Measured,
    bootstrap_interval,
    check_comparable,
    check_recorded,
    compare,
    generations_folder,
    markdown_table,
    parse_with_defaults,
    read_settings,
    sequence_log_ratio,
    summarize,
    training_settings,
    write_results,
)
from async_rlhf.models import Policy, check_model_path, load_causal_lm, load_tokenizer, pad_tokens
from async_rlhf.rewards import Sample, check_reward, load_reward, score_samples
from async_rlhf.rewards.model import same_vocabulary

SETTINGS = ["gold_reward_model_path", "sft_model_path", "baseline_dataset_path", "torch_dtype", "bootstrap_samples", "seed"]


@dataclass
class EvaluateConfig(EvalSamplingConfig, ModelConfig):
    """Which generations, judged by what, against what. `torch_dtype` is that of the SFT and of the gold model."""

    model_name_or_path: str | None = setting(None, "The run whose generations are judged.")
    dataset_path: str | None = setting(None, "Folder of the generations. Default: `_generations` in the run's folder.")
    baseline_dataset_path: str | None = setting(None, "Generations of another model, of the same prompts: the SFT model's, say.")
    gold_reward_model_path: str | None = setting(
        None, "The judge: a model folder or hub name, or a Python function as `path/file.py:name` or `package.module:name`."
    )
    sft_model_path: str | None = setting(None, "What perplexity and KL refer to. Default: the run's own reference policy.")
    output_dir: str | None = setting(None, "Where the results are written. Default: `_evaluation` in the run's folder.")
    batch_size: int = setting(32, "Prompts that the SFT model, samples that the gold model takes at a time.")
    bootstrap_samples: int = setting(2000, "Times that the prompts are drawn anew for an interval.")
    seed: int = setting(1, "Seed of the intervals.")
    dry_run: bool = setting(False, "Check paths and settings, print the plan, load no model.")


def main() -> None:
    config = parse_with_defaults(EvaluateConfig, recorded_defaults)
    quiet_libraries()
    folder = generations_folder(config.dataset_path, config.model_name_or_path)
    record = Generations.load(folder)
    check_recorded(config, record, folder)
    check_reward(config.gold_reward_model_path, "gold_reward_model_path")
    if config.sft_model_path:
        check_model_path(config.sft_model_path, "sft_model_path")
    baseline = Generations.load(Path(config.baseline_dataset_path).expanduser()) if config.baseline_dataset_path else None
    if baseline:
        check_comparable(record, baseline)
    output = Path(config.output_dir or Path(config.model_name_or_path) / "_evaluation").expanduser()
    if config.dry_run:
        against = f"the reference and {baseline.checkpoints[-1]}" if baseline else "the reference"
        print(
            f"{len(record.rows)} prompts × {config.num_generations} completions of {', '.join(record.checkpoints)}, judged by "
            f"{config.gold_reward_model_path} against {against}, KL and perplexity from {config.sft_model_path}; results in {output}"
        )
        return
    results = evaluate(config, record, baseline)
    write_results(results, output)
    print(f"{markdown_table(results)}\nresults.json, results.md and gold_against_kl.png are in {output}")


def recorded_defaults(config: EvaluateConfig) -> dict:
    """Sampling settings and names from the generations' record and from the run's own configuration."""
    settings = read_settings(generations_folder(config.dataset_path, config.model_name_or_path))
    trained = training_settings(config.model_name_or_path or settings["model"])
    return settings["sampling"] | {
        "model_name_or_path": settings["model"],
        "tokenizer_name_or_path": settings["tokenizer"],
        "sft_model_path": trained.get("sft_model_path") or trained.get("model_name_or_path"),
    }


def evaluate(config: EvaluateConfig, record: Generations, baseline: Generations | None) -> dict:
    """What results.json holds: the settings, and results by checkpoint, the baseline's beside them."""
    judges = Judges(config, record, baseline)
    interval = partial(bootstrap_interval, resamples=config.bootstrap_samples, seed=config.seed)
    reference = judges.score_references(record)
    results = {
        "settings": {name: getattr(config, name) for name in SETTINGS} | {"generations": record.settings},
        "prompts": len(record.rows),
        "baseline": {},
        "checkpoints": {},
    }
    if baseline:
        theirs = judges.measure(baseline, baseline.checkpoints[-1])
        results["baseline"][baseline.checkpoints[-1]] = summarize(theirs, reference, interval)
    for name in record.checkpoints:
        measured = judges.measure(record, name)
        results["checkpoints"][name] = summarize(measured, reference, interval)
        if baseline:
            results["checkpoints"][name] |= compare(measured.scores, theirs.scores, interval)
    return results


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
        self.gold = load_reward(
            config.gold_reward_model_path,
            device,
            policy_tokenizer=tokenizer,
            batch_size=config.batch_size,
            dtype=getattr(torch, config.torch_dtype, torch.float32),
            trust_remote_code=config.trust_remote_code,
        )
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
        rows = record.rows.select_columns(["row", "prompt", "prompt_ids"])
        new: dict[tuple, Sample] = {}
        for i, (row, group) in enumerate(zip(rows, responses, strict=True)):
            for said in group:
                if (key := (i, *said["ids"])) not in self._scores:
                    new[key] = Sample(row["prompt"], said["text"], row["prompt_ids"], said["ids"], said["finished"], row["row"])
        if new:
            scores = score_samples(self.gold, list(new.values()), self.config.gold_reward_model_path)
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
