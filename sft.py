"""Supervised fine-tuning on reference completions, by TRL's SFTTrainer.

    python sft.py --config configs/sft_tiny.yml
    python sft.py --model_name_or_path MODEL --dataset_name rows.jsonl --prompt_column question --completion_column answer

Every field of TRL's `SFTConfig` is a setting beside those below. `completion_only_loss: false` trains on the prompt too.
"""

from dataclasses import dataclass

from trl import SFTConfig, SFTTrainer

from async_rlhf.config import parse, require, run_script, setting
from async_rlhf.data import Encoder, map_rows
from async_rlhf.models import (
    check_model_path,
    load_causal_lm,
    load_tokenizer,
    lora_config,
    scratch_causal_lm,
    train_tokenizer,
    trained_dtype,
)
from async_rlhf.supervised import SupervisedConfig, finish, load_splits, print_plan, start


@dataclass
class SFTScriptConfig(SupervisedConfig, SFTConfig):
    """Data and policy, and every field of TRL's SFTConfig, some with defaults that hold on every machine."""

    from_scratch: bool = setting(False, "Start from fresh weights and a tokenizer trained on the corpus (tiny models).")
    scratch_model: dict = setting({}, "Fields of the fresh model's transformers config, as JSON; `model_type` defaults to llama.")
    scratch_vocab_size: int = setting(2048, "Entries of the fresh tokenizer.")
    output_dir: str = setting("results/sft", "Where the model is saved.")
    completion_only_loss: bool = setting(True, "Loss on the completion only, or on prompt and completion.")


def main() -> None:
    config = parse(SFTScriptConfig)
    start(config)
    if not config.from_scratch:
        check_model_path(config.model_name_or_path, "model_name_or_path")
    columns = Encoder.prompt_columns(config) | Encoder.completion_columns(config)
    if config.dry_run:
        print_plan(config, "SFT", columns)
        return
    splits = load_splits(config, columns)

    if config.from_scratch:
        texts = (row[column] for row in splits["train"] for column in sorted(columns))
        tokenizer = train_tokenizer(texts, config.scratch_vocab_size, config.max_length)
        model = scratch_causal_lm(config.scratch_model, tokenizer, config.seed)
    else:
        tokenizer = load_tokenizer(config)
        model = load_causal_lm(config, dtype=trained_dtype(config, config.bf16 or config.fp16))
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
    finish(trainer, config, "SFT")


if __name__ == "__main__":
    run_script(main)
