"""Completions of every checkpoint of a run for the held-out prompts, near-greedy by default, for `load_and_eval.py` to judge.

    python generate_for_eval.py --config configs/generate_tiny.yml --model_name_or_path results/onlinedpo_tiny
    python generate_for_eval.py --config configs/generate_tiny.yml --model_name_or_path checkpoints/sft_docstrings \\
        --dataset_path results/sft_generations_tiny

A run is a folder with `checkpoint-<update>` models, or a model. Data, template and response length are those that it was
trained with (its run_config.json) unless given here. One engine serves all checkpoints: it gets the weights of the next.
"""

import os
import time
from dataclasses import fields, replace
from functools import partial
from importlib.metadata import version

import torch
from datasets import Dataset
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from async_rlhf.config import require, run_script
from async_rlhf.data import Encoder, PromptData, describe_split, load_prompts, quiet_libraries
from async_rlhf.evaluation import Generations, check_replaceable
from async_rlhf.evaluation_config import SAMPLING_FIELDS, SFT, GenerateConfig, generations_folder, parse_generate_config, reference_policy
from async_rlhf.generation import Generator, Sampling
from async_rlhf.models import Policy, end_token_ids, load_causal_lm, load_tokenizer, pad_tokens
from async_rlhf.rollout import Prompt, Rollout
from async_rlhf.runs import find_checkpoints, run_settings
from async_rlhf.supervision import SupervisedGenerator
from async_rlhf.vllm_utils import choose_device, open_generator
from async_rlhf.weights import WeightStore, whole_weights

PROMPTS_AT_A_TIME = 1024
PROBE_TOKENS = 64


def main() -> None:
    config = parse_generate_config()
    quiet_libraries()
    checkpoints = find_checkpoints(config.model_name_or_path)
    newest = list(checkpoints.values())[-1]
    if config.sample_sft:
        sft = reference_policy(run_settings(config.model_name_or_path))
        checkpoints = ({SFT: sft} if sft else {}) | checkpoints
        if not sft:
            print(f"sample_sft: {config.model_name_or_path} has no run_config.json that names a policy it started from")
    folder = generations_folder(config.dataset_path, config.model_name_or_path)
    check_replaceable(folder)
    if config.dry_run:
        print(describe_split(config, "eval", Encoder.prompt_columns(config) | Encoder.completion_columns(config))[0])
        print(
            f"{len(checkpoints)} checkpoints ({', '.join(checkpoints)}), a row × ({config.num_generations} completions at "
            f"temperature {config.temperature} + {config.kl_samples} at {config.kl_temperature}), at most {config.response_length} tokens, "
            f"by {config.generator}; saved in {folder}"
        )
        return

    config.tokenizer_name_or_path = config.tokenizer_name_or_path or newest
    tokenizer = load_tokenizer(config)
    encoder = Encoder(config, tokenizer)
    data = load_prompts(config, encoder, "eval", Encoder.completion_columns(config))
    columns = describe_prompts(data, encoder)
    require(not columns.keys() & checkpoints.keys(), f"a model folder cannot be named {', '.join(columns)} here: rename it")
    generated, mismatches = generate(config, checkpoints, data, tokenizer)
    settings = {
        "model": config.model_name_or_path,
        "tokenizer": config.tokenizer_name_or_path,
        "checkpoints": checkpoints,
        "sampling": {name: getattr(config, name) for name in SAMPLING_FIELDS},
        "seed": config.seed,
        "config": {f.name: getattr(config, f.name) for f in fields(GenerateConfig)},
        "prompts": len(data),
        "dropped": data.dropped,
        "mismatch": mismatches,
        "versions": {name: version(name) for name in ("async-rlhf", "torch", "transformers")},
    }
    Generations(settings, Dataset.from_dict(columns | generated)).save(folder)
    print(f"saved in {folder}")


def describe_prompts(data: PromptData, encoder: Encoder) -> dict[str, list]:
    """The columns that do not depend on a checkpoint. The data-set row is kept whole, for rewards that read its columns."""
    rows = list(data.rows)
    return {
        "row": rows,
        "prompt": [encoder.prompt_text(row) for row in rows],
        "prompt_ids": data.ids,
        "reference": [encoder.completion_text(row) for row in rows],
        "reference_ids": [encoder.completion_ids(row) for row in rows],
    }


def generate(
    config: GenerateConfig, checkpoints: dict[str, str], data: PromptData, tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, list[dict]], dict[str, float]]:
    """A column and the engine's `mismatch` a checkpoint."""
    prompts = [Prompt(i, i, ids) for i, ids in enumerate(data.ids)]
    longest = max(map(len, data.ids)) + config.response_length
    everything = None if torch.cuda.is_available() else "cpu:" + ",".join(map(str, sorted(os.sched_getaffinity(0))))
    device = choose_device(config.vllm_device or everything, training_processes=0)  # nothing trains here
    columns, mismatches = {}, {}
    store, generator = WeightStore(keep=1), None
    try:
        for index, (name, path) in enumerate(checkpoints.items()):
            model = load_causal_lm(config, path)
            check_context(model, longest, data)
            if generator is None:
                opened = partial(open_generator, device=device, trust_remote_code=config.trust_remote_code)
                generator = SupervisedGenerator(
                    partial(opened, config, path, tokenizer, config.torch_dtype, longest), config.max_engine_restarts
                )
            generator.load_weights(store.publish(index, 0, whole_weights(model)))
            mismatches[name] = check_weights(config, generator, model, prompts[0].ids[:PROBE_TOKENS])
            sampling = Sampling.from_config(
                config, config.num_generations, end_token_ids(model, tokenizer, config.stop_token_ids), config.seed
            )
            columns[name] = sample_checkpoint(config, generator, name, prompts, sampling, tokenizer)
    finally:
        store.close()
        if generator is not None:
            generator.close()
    return columns, mismatches


def check_context(model: PreTrainedModel, longest: int, data: PromptData) -> None:
    """Raise `UserError` if the longest prompt and its response do not fit the model."""
    context = getattr(model.config, "max_position_embeddings", None) or longest
    row, tokens = max(enumerate(map(len, data.ids)), key=lambda item: item[1])
    require(
        longest <= context,
        f"prompt {row} has {tokens} tokens; with response_length {longest - tokens} that is over the model's {context}: "
        "lower max_prompt_length or response_length",
    )


@torch.no_grad()
def check_weights(config: GenerateConfig, generator: Generator, model: PreTrainedModel, probe: list[int]) -> float:
    """Largest difference between the engine's logprobs of a probe text and the checkpoint's: it must sample with these weights."""
    tokens = pad_tokens([probe[:1]], [[probe[1:]]], pad_id=0)
    own = Policy(model)(**tokens)[0, 0].tolist() if len(probe) > 1 else []
    mismatch = max((abs(a - b) for a, b in zip(own, generator.score(probe), strict=True)), default=0.0)
    most = config.max_logprob_mismatch or (1e-3 if model.dtype == torch.float32 else 0.5)
    if not mismatch <= most:
        raise RuntimeError(f"the engine's logprobs differ from the checkpoint's by {mismatch:.3g}, over max_logprob_mismatch {most:.3g}")
    return mismatch


def sample_checkpoint(
    config: GenerateConfig,
    generator: Generator,
    name: str,
    prompts: list[Prompt],
    sampling: Sampling,
    tokenizer: PreTrainedTokenizerBase,
) -> list[dict]:
    """The checkpoint's column: its completions and, drawn from the whole distribution, its samples for the KL."""
    started, tokens, column = time.perf_counter(), 0, []
    for_kl = replace(sampling, n=config.kl_samples, temperature=config.kl_temperature, top_p=1.0, top_k=0)
    chunks = range(0, len(prompts), PROMPTS_AT_A_TIME)
    for start in tqdm(chunks, name, disable=len(chunks) == 1):
        chunk = prompts[start : start + PROMPTS_AT_A_TIME]
        responses = generator.generate(chunk, sampling)
        samples = generator.generate(chunk, for_kl) if for_kl.n else []
        tokens += sum(len(rollout.response_ids) for rollout in responses + samples)
        for i in range(len(chunk)):
            own = [as_response(rollout, tokenizer) for rollout in responses[i * sampling.n : (i + 1) * sampling.n]]
            drawn = [{"ids": r.response_ids, "logprobs": r.logprobs} for r in samples[i * for_kl.n : (i + 1) * for_kl.n]]
            column.append({"responses": own, "kl_samples": drawn})
    seconds = time.perf_counter() - started
    print(f"{name}: {tokens} tokens in {seconds:.0f} s, {tokens / seconds:.0f} tokens/s")
    return column


def as_response(rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> dict:
    finished = rollout.finish_reason == "stop"
    text = tokenizer.decode(rollout.response_ids[: -1 if finished else None], skip_special_tokens=True)
    return {"text": text, "ids": rollout.response_ids, "finished": finished}


if __name__ == "__main__":
    run_script(main)
