"""The model card of a checkpoint, and pushing it with the model to the hub."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, ModelCardData, get_token

from async_rlhf.checkpoint import STATE
from async_rlhf.config import RLConfig, require

TRAINED = (
    "objective/score",
    "objective/kl",
    "rollout/response_length",
    "rollout/eos_frac",
    "staleness/batches_mean",
    "staleness/steps_mean",
)


def check_push(config: RLConfig) -> None:
    """Raise `UserError` before the run if the model could not be pushed after it."""
    require(not config.push_to_hub or get_token(), "push_to_hub: no Hugging Face token: run `hf auth login`, set HF_TOKEN, or leave it out")


def model_card(config: RLConfig, algorithm: str, trained: Mapping[str, float], evaluated: Mapping[str, float]) -> ModelCard:
    """What was trained, how stale its samples were, on what, and what it scored: `trained` is the last line of metrics.jsonl,
    `evaluated` that of eval.jsonl, either may be empty."""
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=None if Path(config.model_name_or_path).exists() else config.model_name_or_path,
        datasets=None if Path(config.dataset_name).exists() or config.dataset_name == "docstrings" else [config.dataset_name],
        tags=["async-rlhf", "rlhf", algorithm.lower()],
    )
    mode = "synchronous, on-policy" if config.max_staleness == 0 else f"asynchronous, sampled {config.max_staleness} batches behind"
    facts = {
        "algorithm": f"{algorithm}, loss_type {config.loss_type}",
        "policy before": config.model_name_or_path,
        "reward": ", ".join(map(str, config.rewards)),
        "prompts": f"{config.dataset_name}, split {config.train_split}",
        "staleness": f"max_staleness {config.max_staleness} ({mode}), weight_update {config.weight_update}",
        "mini-batches × epochs": f"{config.num_mini_batches} × {config.num_ppo_epochs}",
        "completions a prompt": config.num_generations,
        "temperature, length": f"{config.temperature}, {config.response_length} tokens",
        "learning rate": config.learning_rate,
        "seed": config.seed,
        "trained on": f"{trained.get('episode', 0)} completions, {trained.get('step', 0)} updates",
    }
    scores = {name: trained[name] for name in TRAINED if name in trained}
    scores |= {name: value for name, value in evaluated.items() if name.startswith("eval/")}
    parts = [
        f"---\n{data.to_yaml()}\n---\n\n# {config.run_name or Path(config.output_dir).name}",
        f"A language model trained with async-rlhf, by {algorithm}.",
        _table("setting", facts),
        "## Scores\n\nThe last training batch, scored by the reward above, and held-out prompts (`eval/`, sampled after `eval/version` "
        "updates) where there were any.",
        _table("metric", {name: f"{value:.4g}" for name, value in scores.items()}),
    ]
    return ModelCard("\n\n".join(parts) + "\n")


def push_checkpoint(folder: Path, config: RLConfig) -> str:
    """Upload a checkpoint, card included, and return its address."""
    api = HfApi()
    repository = api.create_repo(config.hub_model_id or Path(config.output_dir).name, exist_ok=True)
    message = f"{folder.name} of {config.run_name}"
    api.upload_folder(repo_id=repository.repo_id, folder_path=folder, commit_message=message, ignore_patterns=f"{STATE}/**")
    return str(repository)


def _table(title: str, values: Mapping[str, Any]) -> str:
    return "\n".join([f"| {title} | |", "|---|---|", *(f"| {name} | {value} |" for name, value in values.items())])
