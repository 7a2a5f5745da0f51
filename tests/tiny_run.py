"""A tiny Online DPO run in this process, for tests: four updates of eight prompts with two completions, by the HF generator."""

import json

from async_rlhf.trainer import Trainer
from online_dpo import OnlineDPO, OnlineDPOConfig

UPDATES, PROMPTS, K = 4, 8, 2


def settings(model_folder, prompts_file, reward_file, output, **changes) -> OnlineDPOConfig:
    base = dict(
        dataset_name=str(prompts_file),
        prompt_column="text",
        model_name_or_path=str(model_folder),
        reward_model_path=f"{reward_file}:letters",
        output_dir=str(output),
        generator="hf",
        response_length=6,
        max_staleness=0,
        per_device_train_batch_size=PROMPTS * K,
        total_episodes=UPDATES * PROMPTS * K,
        learning_rate=1e-3,
        beta=0.2,
        save_steps=UPDATES,
        seed=7,
    )
    return OnlineDPOConfig(**{**base, **changes})


def train(config: OnlineDPOConfig):
    """The lines of metrics.jsonl, and the trained model."""
    trainer = Trainer(config, OnlineDPO(config))
    trainer.run()
    with open(f"{config.output_dir}/metrics.jsonl") as file:
        return [json.loads(line) for line in file], trainer.optimizer.model
