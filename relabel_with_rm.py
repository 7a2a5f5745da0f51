"""Label preference pairs with a gold reward: score both completions, and put the better one first.

    python relabel_with_rm.py --config configs/relabel_tiny.yml          # makes the pairs, by sampling from the SFT policy
    python relabel_with_rm.py --dataset_name pairs.jsonl --reward_model_path GOLD --output_dir results/relabelled

Existing pairs (`dataset_name` with chosen and rejected) keep every column, and columns that belong to a side, such as
`chosen_model` and `rejected_model`, change places with it. With `model_name_or_path` the pairs are made: `num_generations`
completions a prompt, the best against the worst; prompts whose completions all score the same give no pair.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset, DatasetDict
from tqdm import tqdm
from transformers import AutoConfig

from async_rlhf.config import DataConfig, GeneratorConfig, ModelConfig, parse, require, run_script, setting
from async_rlhf.data import Encoder, load_prompts, load_split, quiet_libraries
from async_rlhf.generation import Sampling
from async_rlhf.losses import penalize_missing_eos, select_pairs
from async_rlhf.models import check_model_path, end_token_ids, load_tokenizer
from async_rlhf.rewards import Reward, Sample, check_reward, load_reward, rollout_samples, score_samples
from async_rlhf.rollout import Prompt
from async_rlhf.vllm_utils import open_generator


@dataclass
class RelabelConfig(DataConfig, ModelConfig, GeneratorConfig):
    reward_model_path: str | None = setting(None, "The gold reward: a model folder or hub name, or a Python function `file.py:name`.")
    reward_batch_size: int = setting(64, "Samples that a reward model scores at a time.")
    missing_eos_penalty: float | None = setting(None, "Made pairs: subtracted from the score of a completion that did not end by itself.")
    num_generations: int = setting(2, "Made pairs: completions sampled a prompt.")
    chunk_size: int = setting(256, "Rows (or prompts) worked on at a time.")
    seed: int = setting(1, "Seed of the sampling.")
    output_dir: str = setting("results/relabelled", "Folder of the new data set, saved by `datasets`.")
    push_to_hub: str | None = setting(None, "Also push it to this hub name.")
    dry_run: bool = setting(False, "Check paths and columns, print the plan, load no model.")

    def __post_init__(self):
        super().__post_init__()
        require(self.num_generations >= 2, f"num_generations {self.num_generations}: a pair needs at least 2")


def main() -> None:
    config = parse(RelabelConfig)
    quiet_libraries()
    makes_pairs = config.model_name_or_path is not None
    check_reward(config.reward_model_path, "reward_model_path")
    require(not Path(config.output_dir).exists(), f"output_dir {config.output_dir!r} exists already: name a new folder")
    columns = Encoder.prompt_columns(config)
    if makes_pairs:
        check_model_path(config.model_name_or_path, "model_name_or_path")
    else:
        columns = columns | {config.chosen_column, config.rejected_column}
    rows = load_split(config, "train", columns)
    if config.dry_run:
        source = f"sampled from {config.model_name_or_path}, best and worst of {config.num_generations}" if makes_pairs else "relabelled"
        print(f"{len(rows)} pairs {source}, scored by {config.reward_model_path}; saved in {config.output_dir}")
        return

    tokenizer = load_tokenizer(config) if makes_pairs or config.chat_template else None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    reward = load_reward(config.reward_model_path, device, policy_tokenizer=tokenizer, batch_size=config.reward_batch_size)
    encoder = Encoder(config, tokenizer)
    pairs = list(make_pairs(config, encoder, reward) if makes_pairs else relabel(config, encoder, reward, rows))
    require(pairs, "no pair: every prompt's completions score the same")
    dataset = DatasetDict({"train": Dataset.from_list(pairs)})
    dataset.save_to_disk(config.output_dir)
    if config.push_to_hub:
        dataset.push_to_hub(config.push_to_hub)
    gap = sum(pair["score_chosen"] - pair["score_rejected"] for pair in pairs) / len(pairs)
    print(f"{len(pairs)} pairs, mean score difference {gap:.3f}, in {config.output_dir}")


def relabel(config: RelabelConfig, encoder: Encoder, reward: Reward, rows: Dataset) -> Iterator[dict]:
    """The rows with scores, the sides swapped where the gold reward prefers the rejected one. Ties stay as they are."""
    swapped = 0
    for start in tqdm(range(0, len(rows), config.chunk_size), "scoring", unit="chunk", mininterval=1.0):
        chunk = [rows[i] for i in range(start, min(start + config.chunk_size, len(rows)))]
        samples = [
            Sample(encoder.prompt_text(row), encoder.completion_text(row, column), columns=row)
            for row in chunk
            for column in (config.chosen_column, config.rejected_column)
        ]
        scores = score_samples(reward, samples, config.reward_model_path).view(-1, 2).tolist()
        for row, (chosen, rejected) in zip(chunk, scores, strict=True):
            row = {**row, "score_chosen": chosen, "score_rejected": rejected}
            swapped += rejected > chosen
            yield swap_sides(row, config.chosen_column, config.rejected_column) if rejected > chosen else row
    print(f"{swapped} of {len(rows)} pairs swapped")


def swap_sides(row: dict, chosen: str, rejected: str) -> dict:
    """Exchange the two sides and every pair of columns whose names differ only in `chosen` against `rejected`."""
    swapped = dict(row)
    for name in row:
        other = rejected if name == chosen else name.replace("chosen", "rejected")
        if other != name and other in row:
            swapped[name], swapped[other] = row[other], row[name]
    return swapped


def make_pairs(config: RelabelConfig, encoder: Encoder, reward: Reward) -> Iterator[dict]:
    """Rows of the data set with `prompt`, the best and the worst completion, and their scores."""
    prompts = load_prompts(config, encoder, "train")
    model_config = AutoConfig.from_pretrained(config.model_name_or_path, trust_remote_code=config.trust_remote_code)
    sampling = Sampling.from_config(
        config, config.num_generations, end_token_ids(model_config, encoder.tokenizer, config.stop_token_ids), config.seed
    )
    longest = config.max_prompt_length + config.response_length
    generator = open_generator(config, config.model_name_or_path, encoder.tokenizer, config.torch_dtype, longest)
    tied = 0
    try:
        for start in tqdm(range(0, len(prompts), config.chunk_size), "sampling", unit="chunk", mininterval=1.0):
            chunk = range(start, min(start + config.chunk_size, len(prompts)))
            rollouts = generator.generate([Prompt(i, i, prompts.ids[i]) for i in chunk], sampling)
            samples = rollout_samples(rollouts, prompts.rows, encoder)
            scores = score_samples(reward, samples, config.reward_model_path)
            finished = torch.tensor([sample.finished for sample in samples])
            scores = penalize_missing_eos(scores, finished, config.missing_eos_penalty).view(len(chunk), -1)
            for i, (best, worst, tie) in enumerate(zip(*(x.tolist() for x in select_pairs(scores)), strict=True)):
                tied += tie
                if not tie:
                    group = samples[i * sampling.n : (i + 1) * sampling.n]
                    yield {
                        **group[0].columns,
                        "prompt": group[0].prompt,
                        config.chosen_column: group[best].response,
                        config.rejected_column: group[worst].response,
                        "score_chosen": float(scores[i, best]),
                        "score_rejected": float(scores[i, worst]),
                    }
    finally:
        generator.close()
    print(f"{tied} of {len(prompts)} prompts gave no pair: all their completions score the same")


if __name__ == "__main__":
    run_script(main)
