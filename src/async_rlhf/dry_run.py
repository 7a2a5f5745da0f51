"""Before a run: every path is checked, and the plan printed, without loading a model."""

from pathlib import Path

import torch

from async_rlhf import distributed
from async_rlhf.adapters import is_base, shares_base
from async_rlhf.config import BatchPlan, RLConfig, UserError, require
from async_rlhf.data import Encoder, describe_split
from async_rlhf.models import check_model_path
from async_rlhf.remote_reference import check_remote_reference
from async_rlhf.rewards import read_rewards
from async_rlhf.vllm_utils import choose_device


def check_paths(config: RLConfig) -> None:
    """Raise `UserError` for a path that cannot be; loads nothing."""
    check_model_path(config.model_name_or_path, "model_name_or_path")
    if config.sft_model_path:
        check_model_path(config.sft_model_path, "sft_model_path")
    value = getattr(config, "value_model_path", None)
    if value:
        check_model_path(value, "value_model_path", adapters=True)
        require(
            not config.share_trunk or is_base(value, config) or shares_base(value, config),
            f"value_model_path {value!r}: a model with a base of its own; with share_trunk name a LoRA adapter of model_name_or_path, or "
            "leave this out",
        )
    rewards = read_rewards(config.rewards, "reward")
    sharded = [name for name, settings in rewards.items() if settings.collective]
    require(
        not (config.score_in_pipeline and sharded), f"score_in_pipeline: reward {', '.join(sharded)} is sharded, and needs all processes"
    )
    compares = ", ".join(name for name, settings in rewards.items() if settings.compares)
    k, reason = config.num_generations, f"the reward {compares} compares the samples of a prompt"
    require(not compares or k > 1, f"num_generations {k}: {reason}, and needs 2 or more")
    require(not compares or not config.eval_steps, f"eval_steps: {reason}, and held-out prompts are sampled once")
    check_remote_reference(config)
    on_trunk = [name for name, settings in rewards.items() if getattr(config, "share_trunk", False) and settings.adapts(config)]
    require(
        not (config.score_in_pipeline and on_trunk),
        f"score_in_pipeline: with share_trunk reward {', '.join(on_trunk)} is an adapter of the model that trains meanwhile",
    )
    require(config.generator != "replay" or Path(config.replay_path).is_file(), f"replay_path {config.replay_path!r}: no such file")


def reward_columns(config: RLConfig) -> set[str]:
    """Columns of the data set that the rewards read, the prompt's apart."""
    rewards = read_rewards(config.rewards, "reward").values()
    references = Encoder.completion_columns(config) if any(settings.reads_reference for settings in rewards) else set()
    return references.union(*(settings.columns for settings in rewards))


def dry_run(config: RLConfig) -> None:
    """Check every path and column and print the plan of the run."""
    check_paths(config)
    if not distributed.is_main_by_environment():
        return
    processes = distributed.launched_processes()
    plan = BatchPlan.of(config, processes)
    for split in ("train", "eval") if config.eval_steps else ("train",):
        print(describe_split(config, split, Encoder.prompt_columns(config) | reward_columns(config))[0])
    print(plan.describe(config))
    print(f"devices: {_device_plan(config, processes)}")
    if config.reference_url:
        print(f"reference: asked of {', '.join(config.reference_url)} ({config.reference_server})")
    files = ["run_config.json", "metrics.jsonl", *(f"checkpoint-{n}" for n in plan.saves(config.save_steps))]
    files += ["eval.jsonl", "completions/"] * bool(config.eval_steps) + ["rollouts.jsonl"] * config.dump_rollouts
    print(f"files in {config.output_dir}: {', '.join(files)}")


def _device_plan(config: RLConfig, processes: int) -> str:
    here = f"{_training(processes, torch.cuda.is_available())}; {_generation(config, processes)}"
    if torch.cuda.is_available() or (config.vllm_device or "").startswith("cpu"):
        return here
    last = config.vllm_device or f"cuda:{processes}"
    beside = f"vLLM on {last}" if config.generator == "vllm" else _generation(config, processes)
    return f"{here}\nwhere there are GPUs: {_training(processes, True)}; {beside}"


def _training(processes: int, on_gpus: bool) -> str:
    where = ("cuda:0" if processes == 1 else f"cuda:0 to cuda:{processes - 1}") if on_gpus else "the CPU"
    return f"{processes} training process{'es' * (processes > 1)} on {where}"


def _generation(config: RLConfig, processes: int) -> str:
    if config.generator != "vllm":
        return f"generator {config.generator} in the training process"
    try:
        return f"vLLM on {choose_device(config.vllm_device, processes)}"
    except UserError as error:
        return f"vLLM on {config.vllm_device}, which is not here ({error})"
