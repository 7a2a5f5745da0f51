"""Label preference pairs with a gold reward: score both completions, and put the better one first.

    python relabel_with_rm.py --config configs/relabel_tiny.yml          # makes the pairs, by sampling from the SFT policy
    python relabel_with_rm.py --dataset_name pairs.jsonl --reward_model_path GOLD --output_dir results/relabelled

Existing pairs (`dataset_name` with chosen and rejected) keep every column, and columns that belong to a side, such as
`chosen_model` and `rejected_model`, change places with it. With `model_name_or_path` the pairs are made: `num_generations`
completions a prompt, the best against the worst; prompts whose completions all score the same give no pair.

However the run stops, the same command continues it, from the labels in `<output_dir>.part`, one file a chunk, to the data set
that an uninterrupted run gives. Other settings or rows are refused there. What a model path holds is not compared: don't put
another model in its place. A reward function may be mended in between.
"""

from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from datasets import Features, Value, load_from_disk
from transformers import AutoConfig

from async_rlhf.config import DataConfig, GeneratorConfig, ModelConfig, UserError, parse, require, run_script, setting
from async_rlhf.data import Encoder, describe_split, load_prompts, load_split, quiet_libraries
from async_rlhf.generation import Sampling
from async_rlhf.losses import penalize_missing_eos, select_pairs
from async_rlhf.models import check_model_path, end_token_ids, load_tokenizer
from async_rlhf.parts import Parts, digest
from async_rlhf.rewards import RewardContext, RewardSet, Sample, load_rewards, read_rewards, rollout_samples
from async_rlhf.rollout import Prompt
from async_rlhf.supervision import SupervisedGenerator
from async_rlhf.vllm_utils import open_generator

# Settings that say where and how fast, or are of no use here: a continued run may change them. All others are taken to matter.
NO_EFFECT = set(
    "output_dir push_to_hub dry_run reward_batch_size hf_generation_batch_size generator_timeout engine_timeout max_engine_restarts "
    "vllm_device vllm_gpu_memory_utilization vllm_cpu_kvcache_gib vllm_enforce_eager eval_split eval_dataset_name max_eval_samples "
    "completion_column completion_template use_peft lora_r lora_alpha lora_dropout lora_target_modules attn_implementation".split()
)
SAMPLING_ONLY = {"seed", "num_generations", "missing_eos_penalty", "max_prompt_length", "overlong_prompts"}
SAMPLING_ONLY |= {field.name for field in fields(GeneratorConfig)}
SCORES = {"score_chosen": Value("float64"), "score_rejected": Value("float64")}


@dataclass
class RelabelConfig(DataConfig, ModelConfig, GeneratorConfig):
    """Which pairs, or how they are made, and the gold reward."""

    reward_model_path: str | None = setting(None, "The gold reward: a model folder or hub name, or a Python function `file.py:name`.")
    reward_batch_size: int = setting(64, "Samples that a reward model scores at a time.")
    missing_eos_penalty: float | None = setting(None, "Made pairs: subtracted from the score of a completion that did not end by itself.")
    num_generations: int = setting(2, "Made pairs: completions sampled a prompt.")
    chunk_size: int = setting(
        1024,
        "Pairs (or prompts) worked on, and saved, at a time: what a stop can cost. Samples of like length within a chunk share a batch: "
        "with prompts of 100 to 512 tokens, 64 samples a batch, about 1 token in 50 is padding at 1024 pairs a chunk, 1 in 7 at 128.",
    )
    seed: int = setting(1, "Seed of the sampling.")
    output_dir: str = setting("results/relabelled", "Folder of the new data set, saved by `datasets`.")
    push_to_hub: str | None = setting(None, "Also push it to this hub name.")
    dry_run: bool = setting(False, "Check paths and columns, print the plan and what an earlier run left, load no model.")

    def __post_init__(self):
        super().__post_init__()
        require(self.num_generations >= 2, f"num_generations {self.num_generations}: a pair needs at least 2")
        require(self.chunk_size >= 1, f"chunk_size {self.chunk_size}: at least 1")

    @property
    def makes_pairs(self) -> bool:
        return self.model_name_or_path is not None

    def columns(self) -> set[str]:
        return Encoder.prompt_columns(self) | (set() if self.makes_pairs else {self.chosen_column, self.rejected_column})

    def effective(self) -> dict:
        """The settings that decide which data set comes out."""
        ignored = NO_EFFECT | (set() if self.makes_pairs else SAMPLING_ONLY)
        return {name: value for name, value in asdict(self).items() if name not in ignored}


def main() -> None:
    config = parse(RelabelConfig)
    quiet_libraries()
    output = Path(config.output_dir)
    [settings] = read_rewards([config.reward_model_path], "reward_model_path").values()
    readable = config.makes_pairs or not settings.reads_reference
    require(readable, "reward_model_path: it reads the data set's own completion (relative, {reference}), and existing pairs have none")
    if config.makes_pairs:
        check_model_path(config.model_name_or_path, "model_name_or_path")
    require(not output.exists(), f"output_dir {config.output_dir!r} exists already: name a new folder")
    parts = Parts(output.with_name(f"{output.name}.part"))
    parts.check(config.effective())
    if config.dry_run:
        print_plan(config, parts)
        return

    tokenizer = load_tokenizer(config) if config.makes_pairs or config.chat_template else None
    pairs = (SampledPairs if config.makes_pairs else ExistingPairs)(config, Encoder(config, tokenizer))
    parts.open(config.effective() | {"number of rows": len(pairs.rows), "content of the rows": digest(pairs.rows)})
    if parts.missing(len(pairs.rows), config.chunk_size):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = getattr(torch, config.torch_dtype, torch.float32)
        context = RewardContext(device, tokenizer, config.reward_batch_size, dtype, config.trust_remote_code)
        pairs.start(load_rewards([config.reward_model_path], "reward_model_path", context))
        with closing(pairs):
            parts.fill(len(pairs.rows), config.chunk_size, pairs.label, pairs.unit, lambda labels: {"gap": abs(score_gaps(labels)).mean()})
    gaps = score_gaps(parts.read())  # all of them, those of an earlier run included
    require(len(gaps), "no pair: every prompt's completions score the same")
    parts.assemble(map(pairs.row, parts.read()), pairs.features, output)
    if config.push_to_hub:
        load_from_disk(str(output)).push_to_hub(config.push_to_hub)
    print(pairs.summary(gaps))
    print(f"{len(gaps)} pairs, mean score difference {abs(gaps).mean():.3f}, in {config.output_dir}")


def print_plan(config: RelabelConfig, parts: Parts) -> None:
    how = f"sampled from {config.model_name_or_path}, best and worst of {config.num_generations}" if config.makes_pairs else "relabelled"
    print(describe_split(config, "train", config.columns())[0])
    print(f"pairs {how}, scored by {config.reward_model_path}, {config.chunk_size} rows at a time; saved in {config.output_dir}")
    if parts.folder.exists():
        print(f"{len(parts.done())} parts of {config.chunk_size} rows are done in {parts.folder}: the run continues with the others")


def score_gaps(labels: Iterable[dict]) -> np.ndarray:
    """Score of the chosen less that of the rejected completion, `[pairs]`, as labelled: below 0 the sides are to be swapped."""
    return np.array([chosen - rejected for chosen, rejected in (label["scores"] for label in labels)])


class ExistingPairs:
    """Rows that have both completions. The sides are swapped where the reward prefers the rejected one; ties stay as they are.

    A label: `row`, its number, and `scores` of the chosen and the rejected completion as the row has them.
    """

    unit = "pairs"

    def __init__(self, config: RelabelConfig, encoder: Encoder):
        self.config, self.encoder = config, encoder
        self.sides = config.chosen_column, config.rejected_column
        self.rows = load_split(config, "train", config.columns())
        for name in (*self.sides, *([] if config.prompt_template else [config.prompt_column])):
            nulls = self.rows.with_format("arrow")[name][:].null_count  # refused now, and not hours later
            require(not nulls, f"dataset {config.dataset_name!r}: column {name!r} is null in {nulls} of {len(self.rows)} rows")
        self.features = swappable({**self.rows.features, **SCORES}, *self.sides)

    def start(self, rewards: RewardSet) -> None:
        self.rewards = rewards

    def label(self, chunk: range) -> list[dict]:
        samples = [
            Sample(self.encoder.prompt_text(row), self.encoder.completion_text(row, column), columns=row, group=i)
            for i, row in zip(chunk, self.rows.select(chunk), strict=True)
            for column in self.sides
        ]
        scores = self.rewards.score(samples).total.view(-1, 2).tolist()
        return [{"row": row, "scores": pair} for row, pair in zip(chunk, scores, strict=True)]

    def row(self, label: dict) -> dict:
        chosen, rejected = label["scores"]
        row = {**self.rows[label["row"]], "score_chosen": chosen, "score_rejected": rejected}
        return swap_sides(row, *self.sides) if rejected > chosen else row

    def summary(self, gaps: np.ndarray) -> str:
        return f"{(gaps < 0).sum()} of {len(gaps)} pairs swapped; {(gaps == 0).sum()} score the same on both sides"

    def close(self) -> None:
        pass


class SampledPairs:
    """The best and the worst of the completions that a policy gives to a prompt.

    A label: `row`, the number of its prompt, the two `responses` and their `scores`. A prompt whose completions all tie has none.
    """

    unit = "prompts"

    def __init__(self, config: RelabelConfig, encoder: Encoder):
        self.config, self.encoder = config, encoder
        self.prompts = load_prompts(config, encoder, "train")
        self.rows = self.prompts.rows
        texts = dict.fromkeys(("prompt", config.chosen_column, config.rejected_column), Value("string"))
        self.features = Features({**self.rows.features, **texts, **SCORES})

    def start(self, rewards: RewardSet) -> None:
        config, tokenizer = self.config, self.encoder.tokenizer
        model_config = AutoConfig.from_pretrained(config.model_name_or_path, trust_remote_code=config.trust_remote_code)
        end_ids = end_token_ids(model_config, tokenizer, config.stop_token_ids)
        longest = config.max_prompt_length + config.response_length
        self.rewards, self.sampling = rewards, Sampling.from_config(config, config.num_generations, end_ids, config.seed)
        self.generator = SupervisedGenerator(
            lambda: open_generator(config, config.model_name_or_path, tokenizer, config.torch_dtype, longest), config.max_engine_restarts
        )

    def label(self, chunk: range) -> list[dict]:
        """A completion's noise depends on the seed and the prompt's number alone, so a continued run samples the same."""
        config, n = self.config, self.sampling.n
        rollouts = self.generator.generate([Prompt(i, i, self.prompts.ids[i]) for i in chunk], self.sampling)
        samples = rollout_samples(rollouts, self.rows, self.encoder)
        scores = self.rewards.score(samples).total
        finished = torch.tensor([sample.finished for sample in samples])
        scores = penalize_missing_eos(scores, finished, config.missing_eos_penalty).view(len(chunk), n)
        labels = []
        for i, (best, worst, tie) in enumerate(zip(*(x.tolist() for x in select_pairs(scores)), strict=True)):
            if not tie:
                responses = [samples[i * n + best].response, samples[i * n + worst].response]
                labels.append({"row": chunk[i], "responses": responses, "scores": scores[i, [best, worst]].tolist()})
        return labels

    def row(self, label: dict) -> dict:
        row, sides = self.rows[label["row"]], (self.config.chosen_column, self.config.rejected_column)
        made = zip((*sides, *SCORES), (*label["responses"], *label["scores"]), strict=True)
        return {**row, "prompt": self.encoder.prompt_text(row), **dict(made)}

    def summary(self, gaps: np.ndarray) -> str:
        return f"{len(self.rows) - len(gaps)} of {len(self.rows)} prompts gave no pair: all their completions score the same"

    def close(self) -> None:
        self.generator.close()


def swappable(features: dict, chosen: str, rejected: str) -> Features:
    """The features, with one type for two columns that change places: null and text are text, integer and float are float."""
    features = dict(features)
    for name, other in swap_sides(features, chosen, rejected).items():
        if features[name] != other:
            schemas = [Features({name: feature}).arrow_schema.remove_metadata() for feature in (features[name], other)]
            try:
                features |= Features.from_arrow_schema(pa.unify_schemas(schemas, promote_options="permissive"))
            except pa.ArrowException as error:
                raise UserError(f"column {name!r} changes places with one of another type: {' '.join(str(error).split())}") from error
    return Features(features)


def swap_sides(row: dict, chosen: str, rejected: str) -> dict:
    """Exchange the two sides and every pair of columns whose names differ only in `chosen` against `rejected`."""
    swapped = dict(row)
    for name in row:
        other = rejected if name == chosen else name.replace("chosen", "rejected")
        if other != name and other in row:
            swapped[name], swapped[other] = row[other], row[name]
    return swapped


if __name__ == "__main__":
    run_script(main)
