"""A tiny run in this process, for tests: four updates of eight prompts with two completions, by the HF generator."""

import json

from async_rlhf.trainer import Trainer
from online_dpo import OnlineDPO, OnlineDPOConfig
from ppo import PPO, PPOConfig
from rloo import RLOO, RLOOConfig

UPDATES, PROMPTS, K = 4, 8, 2
ALGORITHMS = {OnlineDPOConfig: OnlineDPO, PPOConfig: PPO, RLOOConfig: RLOO}


def settings(model_folder, prompts_file, reward_file, output, config_class=OnlineDPOConfig, **changes):
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
        num_generations=K,
        learning_rate=1e-3,
        save_steps=UPDATES,
        seed=7,
    )
    if config_class is OnlineDPOConfig:
        base["beta"] = 0.2
    return config_class(**{**base, **changes})


def train(config):
    """The lines of metrics.jsonl, and the trained model."""
    trainer = Trainer(config, ALGORITHMS[type(config)](config))
    trainer.run()
    with open(f"{config.output_dir}/metrics.jsonl") as file:
        return [json.loads(line) for line in file], trainer.optimizer.model
