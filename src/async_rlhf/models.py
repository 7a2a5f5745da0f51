"""Load policy, tokenizer and scratch models; response log-probabilities."""

import os
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from async_rlhf.config import ModelConfig, UserError, require

PAD, EOS = "<pad>", "<eos>"


def check_model_path(path: str | None, field: str) -> None:
    """Raise `UserError` for a model path that cannot be: empty, or a folder that looks local and is not there or has no config."""
    require(path, f"{field} is not set: a model folder or a hub name is needed")
    folder = Path(path)
    if folder.is_dir():
        require((folder / "config.json").exists(), f"{field} {path!r}: the folder has no config.json, so it is no model")
    else:
        local = path.startswith((".", "/", "~")) or path.count("/") > 1 or Path(path.split("/")[0]).is_dir()
        require(not local, f"{field} {path!r}: no such folder")


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The policy's tokenizer, with a pad token (eos stands in where there is none: masks never read the pad id)."""
    path = config.tokenizer_name_or_path or config.model_name_or_path
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, revision=config.model_revision, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(f"no tokenizer at {path!r}: set tokenizer_name_or_path ({' '.join(str(error).split())[:200]})") from error
    require(tokenizer.eos_token_id is not None, f"the tokenizer at {path!r} has no eos_token: a response could not end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_causal_lm(config: ModelConfig, path: str | None = None) -> PreTrainedModel:
    """The policy (or the model at `path`) in `torch_dtype`, dropout off.

    Raises:
        UserError: nothing loadable there.
    """
    path = path or config.model_name_or_path
    dtype = config.torch_dtype if config.torch_dtype == "auto" else getattr(torch, config.torch_dtype)
    kwargs = {"attn_implementation": config.attn_implementation} if config.attn_implementation else {}
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, revision=config.model_revision, dtype=dtype, trust_remote_code=config.trust_remote_code, **kwargs
        )
    except (OSError, ValueError) as error:
        raise UserError(f"no model at {path!r}: {' '.join(str(error).split())[:300]}") from error
    return model.eval()


def end_token_ids(model_config, tokenizer: PreTrainedTokenizerBase, extra: list[int] | None = None) -> tuple[int, ...]:
    """Every id that ends a response: the tokenizer's eos, the generation config's (Llama-3 has several) and `extra`."""
    ids = {tokenizer.eos_token_id, *(extra or [])}
    for source in (model_config, getattr(model_config, "generation_config", None)):
        found = getattr(source, "eos_token_id", None)
        ids |= set(found if isinstance(found, list) else [found])
    return tuple(sorted(ids - {None}))


def train_tokenizer(texts, vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `vocab_size` entries trained on `texts`, with separate pad and eos tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[PAD, EOS], initial_alphabet=alphabet, show_progress=False),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, model_max_length=max_length)


def scratch_causal_lm(settings: dict, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """A model with fresh weights. `settings` are the fields of its `transformers` config, `model_type` among them."""
    settings = dict(settings)
    model_type = settings.pop("model_type", "llama")
    special = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
    }
    try:
        config = AutoConfig.for_model(model_type, **{"vocab_size": len(tokenizer), **special, **settings})
    except ValueError as error:
        raise UserError(f"scratch_model: {error}") from error
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str | os.PathLike, state_dict=None) -> None:
    """A Hugging Face folder: written beside its place and renamed into it, so that it is whole or not there."""
    folder = Path(folder)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    model.save_pretrained(temporary, state_dict=state_dict)
    tokenizer.save_pretrained(temporary)
    temporary.rename(folder)
