"""Supervised fine-tuning on reference completions, by TRL's SFTTrainer.

    python sft.py --config configs/sft_tiny.yml
    python sft.py --model_name_or_path MODEL --dataset_name rows.jsonl --prompt_column question --completion_column answer

Every field of TRL's `SFTConfig` is a setting beside those below. `completion_only_loss: false` trains on the prompt too.
"""

from dataclasses import dataclass

import torch
from trl import SFTConfig, SFTTrainer

from async_rlhf.config import DataConfig, ModelConfig, parse, require, run_script, setting
from async_rlhf.data import Encoder, load_split, map_rows, quiet_libraries
from async_rlhf.models import check_model_path, load_causal_lm, load_tokenizer, lora_config, scratch_causal_lm, train_tokenizer


@dataclass
class SFTScriptConfig(DataConfig, ModelConfig, SFTConfig):
    """Data and policy, and every field of TRL's SFTConfig, some with defaults that hold on every machine."""

    from_scratch: bool = setting(False, "Start from fresh weights and a tokenizer trained on the corpus (tiny models).")
    scratch_model: dict = setting({}, "Fields of the fresh model's transformers config, as JSON; `model_type` defaults to llama.")
    scratch_vocab_size: int = setting(2048, "Entries of the fresh tokenizer.")
    dry_run: bool = setting(False, "Check paths and columns, print the plan, load no model.")
    output_dir: str = setting("results/sft", "Where the model is saved.")
    bf16: bool = setting(False, "Mixed precision with bfloat16.")
    gradient_checkpointing: bool = setting(False, "Recompute activations in the backward pass.")
    completion_only_loss: bool = setting(True, "Loss on the completion only, or on prompt and completion.")
    report_to: str = setting("none", "Trackers: wandb, tensorboard, trackio, none.")

    def __post_init__(self):
        self.use_cpu = self.use_cpu or not torch.cuda.is_available()
        super().__post_init__()


def main() -> None:
    config = parse(SFTScriptConfig)
    quiet_libraries()
    if not config.from_scratch:
        check_model_path(config.model_name_or_path, "model_name_or_path")
    columns = Encoder.prompt_columns(config) | Encoder.completion_columns(config)
    splits = {"train": load_split(config, "train", columns)}
    if config.eval_strategy != "no":
        splits["eval"] = load_split(config, "eval", columns)
    if config.dry_run:
        steps = config.num_train_epochs * len(splits["train"]) / config.train_batch_size / config.gradient_accumulation_steps
        print(f"SFT on {len(splits['train'])} rows, about {steps:.0f} steps on one process; saved in {config.output_dir}")
        return

    if config.from_scratch:
        texts = (row[column] for row in splits["train"] for column in sorted(columns))
        tokenizer = train_tokenizer(texts, config.scratch_vocab_size, config.max_length)
        model = scratch_causal_lm(config.scratch_model, tokenizer, config.seed)
    else:
        tokenizer, model = load_tokenizer(config), load_causal_lm(config)
    encoder = Encoder(config, tokenizer)

    def encode(row: dict) -> dict:
        prompt, completion = encoder.prompt_ids(row), encoder.completion_ids(row)
        return {"input_ids": prompt + completion, "completion_mask": [0] * len(prompt) + [1] * len(completion)}

    encoded = {}
    for split, rows in splits.items():
        kept = map_rows(rows, encode, f"tokenizing {split}").filter(lambda row: len(row["input_ids"]) <= config.max_length)
        print(f"{split}: {len(kept)} rows, {len(rows) - len(kept)} over max_length {config.max_length} dropped")
        require(len(kept), f"{split}: no row fits max_length {config.max_length}")
        encoded[split] = kept
    trainer = SFTTrainer(
        model=model,
        args=config,
        processing_class=tokenizer,
        train_dataset=encoded["train"],
        eval_dataset=encoded.get("eval"),
        peft_config=lora_config(config),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    run_script(main)
