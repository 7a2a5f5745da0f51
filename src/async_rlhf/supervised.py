"""What `sft.py` and `reward_modeling.py` share around TRL's trainers: defaults that hold on every machine, and the run's record."""

from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset
from transformers import Trainer

from async_rlhf import distributed
from async_rlhf.config import DataConfig, ModelConfig, RunConfig, setting
from async_rlhf.data import describe_split, load_split, quiet_libraries
from async_rlhf.runs import link_output, place_run, record_run
from async_rlhf.trackers import export_identity
from async_rlhf.weights import plain_model


@dataclass
class SupervisedConfig(RunConfig, DataConfig, ModelConfig):
    """What both scripts over TRL's trainers set for themselves."""

    bf16: bool = setting(False, "Mixed precision with bfloat16.")
    gradient_checkpointing: bool = setting(False, "Recompute activations in the backward pass.")
    dry_run: bool = setting(False, "Check paths and columns, print the plan, load no model.")

    def __post_init__(self):
        self.use_cpu = self.use_cpu or not torch.cuda.is_available()
        super().__post_init__()

    @property
    def splits(self) -> list[str]:
        return ["train"] if self.eval_strategy == "no" else ["train", "eval"]


def start(config: SupervisedConfig) -> None:
    quiet_libraries()
    place_run(config)
    export_identity(config)


def load_splits(config: SupervisedConfig, columns: set[str]) -> dict[str, Dataset]:
    return {split: load_split(config, split, columns) for split in config.splits}


def print_plan(config: SupervisedConfig, title: str, columns: set[str]) -> None:
    """Check the columns of what is not on the hub, and print rows, batch and steps."""
    if not distributed.is_main_by_environment():
        return
    processes = distributed.launched_processes()
    batch = config.per_device_train_batch_size * config.gradient_accumulation_steps * processes
    for split in config.splits:
        text, rows = describe_split(config, split, columns)
        print(text)
        if split == "train" and rows:
            print(f"about {config.num_train_epochs * rows / batch:.0f} steps")
    print(
        f"{title}: a batch of {batch} rows ({config.per_device_train_batch_size} a forward × {config.gradient_accumulation_steps} "
        f"accumulated × {processes} processes), {config.num_train_epochs:g} epochs; saved in {config.output_dir}"
    )


def finish(trainer: Trainer, config: SupervisedConfig, algorithm: str, keep_adapter: bool = False) -> None:
    """Train, save, and leave the run's record and link. An adapter is merged into what is saved unless it is kept."""
    trainer.train()
    sharded = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled  # only the trainer can gather it then, and saves the adapter alone
    if sharded or not config.use_peft:
        trainer.save_model()
    elif distributed.is_main():
        model = trainer.accelerator.unwrap_model(trainer.model)
        if keep_adapter:  # embeddings differ from the base's by a pad token's at most, which no score reads
            model.save_pretrained(config.output_dir, save_embedding_layers=False)
        else:  # whole, so that every other script can load it
            model, state = plain_model(model)
            model.save_pretrained(config.output_dir, state_dict=state)
        trainer.processing_class.save_pretrained(config.output_dir)
    if distributed.is_main():
        record_run(Path(config.output_dir), algorithm, config.to_dict())
        link_output(Path(config.output_dir))
