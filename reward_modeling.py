"""Train a reward model on preference pairs, by TRL's RewardTrainer.

    python reward_modeling.py --config configs/rm_tiny.yml

The model is a sequence classifier with one output: a decoder, say the SFT policy with a fresh head, or an encoder such as
MiniLM with its own tokenizer. Every field of TRL's `RewardConfig` is a setting beside those below.
"""

from dataclasses import dataclass

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed
from trl import RewardConfig, RewardTrainer

from async_rlhf.config import UserError, parse, require, run_script, setting
from async_rlhf.data import Encoder, map_rows
from async_rlhf.models import check_model_path, lora_config, trained_dtype
from async_rlhf.rewards.model import ENCODERS, encode_pair, join_ids
from async_rlhf.supervised import SupervisedConfig, finish, load_splits, print_plan, start


@dataclass
class RewardModelingConfig(SupervisedConfig, RewardConfig):
    """Data and model, and every field of TRL's RewardConfig, some with defaults that hold on every machine."""

    output_dir: str = setting("results/rm", "Where the model is saved.")
    keep_adapter: bool = setting(
        False, "With use_peft: save the LoRA adapter and the head alone. They score with their base, which ppo.py may share (share_trunk)."
    )

    def __post_init__(self):
        super().__post_init__()
        require(self.use_peft or not self.keep_adapter, "keep_adapter: there is an adapter with use_peft alone")
        require(self.max_length, "max_length is not set: the longest prompt + response that the reward model reads, in tokens")


def main() -> None:
    config = parse(RewardModelingConfig)
    start(config)
    check_model_path(config.model_name_or_path, "model_name_or_path")
    columns = Encoder.prompt_columns(config) | {config.chosen_column, config.rejected_column}
    if config.dry_run:
        print_plan(config, "reward model", columns)
        return
    splits = load_splits(config, columns)

    tokenizer, model = load_reward_base(config)
    encoder = Encoder(config, tokenizer)
    is_encoder = model.config.model_type in ENCODERS

    def encode(row: dict) -> dict:
        def one(column: str) -> list[int]:
            if is_encoder:
                return encode_pair(tokenizer, encoder.prompt_text(row), encoder.completion_text(row, column), config.max_length)
            return join_ids(encoder.prompt_ids(row), encoder.completion_ids(row, column), config.max_length)

        return {"chosen_ids": one(config.chosen_column), "rejected_ids": one(config.rejected_column)}

    encoded = {split: map_rows(rows, encode, f"tokenizing {split}") for split, rows in splits.items()}
    peft = lora_config(config)
    if peft:
        peft.task_type, peft.modules_to_save, peft.revision = "SEQ_CLS", ["score"], config.model_revision
    trainer = RewardTrainer(
        model=model,
        args=config,
        processing_class=tokenizer,
        train_dataset=encoded["train"],
        eval_dataset=encoded.get("eval"),
        peft_config=peft,
    )
    finish(trainer, config, "RewardModeling", config.keep_adapter)


def load_reward_base(config: RewardModelingConfig):
    """Tokenizer and classifier with one output. A pad id that no text contains marks where a sequence ends, so where the
    tokenizer pads with eos, or not at all, it gets a `[PAD]` of its own."""
    source = config.tokenizer_name_or_path or config.model_name_or_path
    settings = {"revision": config.model_revision, "trust_remote_code": config.trust_remote_code}
    set_seed(config.seed)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, truncation_side="left", **settings)
        dtype = trained_dtype(config, config.bf16 or config.fp16)
        dtype = dtype if dtype == "auto" else getattr(torch, dtype)
        model = AutoModelForSequenceClassification.from_pretrained(config.model_name_or_path, num_labels=1, dtype=dtype, **settings)
    except (OSError, ValueError) as error:
        raise UserError(f"no model for a reward at {config.model_name_or_path!r}: {' '.join(str(error).split())[:300]}") from error
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
        if len(tokenizer) > model.config.vocab_size:
            model.resize_token_embeddings(len(tokenizer))
    if tokenizer.eos_token_id is None:  # an encoder's separator ends its sequences
        tokenizer.eos_token = tokenizer.sep_token
    model.config.pad_token_id = tokenizer.pad_token_id
    tokenizer.model_max_length = config.max_length  # saved with it, so that the model scores what it was trained on
    return tokenizer, model


if __name__ == "__main__":
    run_script(main)
