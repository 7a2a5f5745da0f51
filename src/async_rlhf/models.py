"""Load policy, tokenizer and scratch models; response log-probabilities."""

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Cache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from async_rlhf.config import ModelConfig, UserError, require

PAD, EOS = "<pad>", "<eos>"
DIGEST_ELEMENTS = 4096  # of each parameter
TOKEN_FIELDS = ("prompt_ids", "prompt_length", "response_ids", "response_length")  # of `pad_tokens`: what a forward takes


def check_model_path(path: str | None, field: str, adapters: bool = False) -> None:
    """Raise `UserError` for a model path that cannot be: empty, or a folder that looks local and is not there or has no config, of a model
    or, with `adapters`, of a LoRA adapter."""
    require(path, f"{field} is not set: a model folder or a hub name is needed")
    folder = Path(path)
    if folder.is_dir():
        named = ["config.json"] + ["adapter_config.json"] * adapters
        found = any((folder / name).exists() for name in named)
        require(found, f"{field} {path!r}: the folder has no {' and no '.join(named)}, so it is no model")
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


def load_causal_lm(config: ModelConfig, path: str | None = None, dtype: str | None = None) -> PreTrainedModel:
    """The policy (or the model at `path`) in `dtype`, by default `torch_dtype`; dropout off.

    Raises:
        UserError: nothing loadable there.
    """
    path, dtype = path or config.model_name_or_path, dtype or config.torch_dtype
    dtype = dtype if dtype == "auto" else getattr(torch, dtype)
    kwargs = {"attn_implementation": config.attn_implementation} if config.attn_implementation else {}
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, revision=config.model_revision, dtype=dtype, trust_remote_code=config.trust_remote_code, **kwargs
        )
    except (OSError, ValueError) as error:
        raise UserError(f"no model at {path!r}: {' '.join(str(error).split())[:300]}") from error
    return model.eval()


def trained_dtype(config: ModelConfig, mixed_precision: bool) -> str:
    """The type of weights that train: float32 under mixed precision, so that small steps are not lost and a gradient scaler can
    work; else `torch_dtype`. The frozen base of an adapter stays in `torch_dtype`; `peft` keeps the adapter itself in float32."""
    return "float32" if mixed_precision and not config.use_peft else config.torch_dtype


def lora_config(config: ModelConfig) -> LoraConfig | None:
    """The `peft` config of the LoRA fields, or None without `use_peft`."""
    if not config.use_peft:
        return None
    return LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=config.lora_target_modules,
        task_type="CAUSAL_LM",
    )


def end_token_ids(model_config, tokenizer: PreTrainedTokenizerBase, extra: list[int] | None = None) -> tuple[int, ...]:
    """Every id that ends a response: the tokenizer's eos, the generation config's (Llama-3 has several) and `extra`."""
    ids = {tokenizer.eos_token_id, *(extra or [])}
    for source in (model_config, getattr(model_config, "generation_config", None)):
        found = getattr(source, "eos_token_id", None)
        ids |= set(found if isinstance(found, list) else [found])
    return tuple(sorted(ids - {None}))


def pad_tokens(prompts: list[list[int]], responses: list[list[list[int]]], pad_id: int) -> dict[str, torch.Tensor]:
    """Tensors of p prompts with k responses each: `prompt_ids [p, P]` padded left, `prompt_length [p]`,
    `response_ids [p, k, R]` padded right, `response_length [p, k]`. Masks come from the lengths, so `pad_id` may be any id."""
    prompt_length = torch.tensor([len(ids) for ids in prompts])
    response_length = torch.tensor([[len(ids) for ids in group] for group in responses])
    widest, longest = int(prompt_length.max()), max(1, int(response_length.max()))
    return {
        "prompt_ids": torch.tensor([[pad_id] * (widest - len(ids)) + ids for ids in prompts]),
        "prompt_length": prompt_length,
        "response_ids": torch.tensor([[ids + [pad_id] * (longest - len(ids)) for ids in group] for group in responses]),
        "response_length": response_length,
    }


def length_mask(lengths: torch.Tensor, width: int) -> torch.Tensor:
    """`[..., width]`, True at the first `lengths [...]` places."""
    return torch.arange(width, device=lengths.device) < lengths[..., None]


class Policy(nn.Module):
    """A causal LM whose forward gives the log-probabilities of responses.

    The k responses of a prompt share one forward of it (`share_prompts`): the prompt's keys and values are computed once,
    repeated k times, and the responses run through them; gradients flow through the cache. The plain way, k whole sequences,
    gives the same numbers; it is taken for k = 1 and under gradient checkpointing, which switches the cache off.
    """

    def __init__(self, model: PreTrainedModel, share_prompts: bool = True):
        super().__init__()
        self.model, self.share_prompts = model, share_prompts

    @property
    def vocabulary(self) -> int:
        return self.model.get_input_embeddings().num_embeddings

    @property
    def policy(self) -> "Policy":
        """The policy of a trained module, which may hold more (`Algorithm.module`)."""
        return self

    def forward(
        self,
        prompt_ids: torch.Tensor,
        prompt_length: torch.Tensor,
        response_ids: torch.Tensor,
        response_length: torch.Tensor,
        temperature: float = 1.0,
    ) -> torch.Tensor:
        """Log-probability of each response token at `temperature` (0 counts as 1): `[p, k, R]`, as wide as `response_ids`; what
        stands after a response's end is meaningless. Columns that only pad are not computed. Shapes as in `pad_tokens`."""
        logits = run_responses(self._run, self.model, self.share_prompts, prompt_ids, prompt_length, response_ids, response_length)
        ids = response_ids[..., : logits.shape[1]]
        logprobs = token_logprobs(logits, ids.flatten(0, 1), temperature).view(ids.shape)
        return F.pad(logprobs, (0, response_ids.shape[-1] - logprobs.shape[-1]))

    def _run(self, keep: int, **inputs) -> tuple[torch.Tensor, Cache | None]:
        output = self.model(**inputs, logits_to_keep=keep)
        return output.logits, output.past_key_values


def run_responses(
    run: Callable[..., tuple[torch.Tensor, Cache | None]],
    model: nn.Module,
    share_prompts: bool,
    prompt_ids: torch.Tensor,
    prompt_length: torch.Tensor,
    response_ids: torch.Tensor,
    response_length: torch.Tensor,
    last: bool = False,
) -> torch.Tensor:
    """What `run` gives in the state before each response token, `[p · k, R', d]`, with `last` also after it, `[p · k, R' + 1, d]`.

    Shapes as in `pad_tokens`; R' is the longest response: columns that only pad are not computed. `run(keep, input_ids, …)` gives the
    last `keep` columns and the cache. Prompts are shared where the model allows it.
    """
    prompts = prompt_ids[:, prompt_ids.shape[1] - int(prompt_length.max()) :]
    responses = response_ids[:, :, : max(1, int(response_length.max()))]
    k, longest = responses.shape[1:]
    width, lengths = prompts.shape[1], prompt_length.repeat_interleave(k)
    if not share_prompts or k == 1 or getattr(model, "is_gradient_checkpointing", False):
        mask, positions = _left_padded(lengths, width, longest)
        tokens = torch.cat([prompts.repeat_interleave(k, 0), responses.flatten(0, 1)], 1)
        states, _ = run(longest + 1, input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False)
        return states if last else states[:, :-1]
    mask, positions = _left_padded(prompt_length, width, 0)
    first, cache = run(1, input_ids=prompts, attention_mask=mask, position_ids=positions, use_cache=True)
    first = first.repeat_interleave(k, 0)
    said = responses.flatten(0, 1) if last else responses.flatten(0, 1)[:, :-1]
    if not said.shape[1]:
        return first
    cache.batch_repeat_interleave(k)
    mask, positions = _left_padded(lengths, width, said.shape[1])
    rest, _ = run(
        said.shape[1],
        input_ids=said,
        attention_mask=mask,
        position_ids=positions[:, width:],
        past_key_values=cache,
        use_cache=True,
    )
    return torch.cat([first, rest], 1)


def _left_padded(prompt_length: torch.Tensor, prompt_width: int, response_width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention mask and position ids `[n, prompt_width + response_width]` of left-padded prompts and what follows them."""
    columns = torch.arange(prompt_width + response_width, device=prompt_length.device)
    positions = columns - (prompt_width - prompt_length[:, None])
    return (positions >= 0).long(), positions.clamp(min=0)


def token_logprobs(logits: torch.Tensor, ids: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Log-probability of `ids [n, R]` under `logits [n, R, vocabulary]` at `temperature`, in float32: `[n, R]`."""
    logits = logits.float() / (temperature or 1.0)
    return logits.gather(-1, ids[..., None])[..., 0] - logits.logsumexp(-1)


def disable_dropout(model: nn.Module) -> None:
    """Sampling has no dropout; a loss over its samples must not either."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def weights_digest(model: nn.Module) -> str:
    """16 hex digits of a hash of a part of every parameter, so that models with other weights, or in another type, have another."""
    sha = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        some = flat[:: max(1, len(flat) // DIGEST_ELEMENTS)].float().cpu()
        sha.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode() + some.numpy().tobytes())
    return sha.hexdigest()[:16]


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


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | os.PathLike,
    state_dict=None,
    card: str | None = None,
    beside: Mapping[str, tuple[PreTrainedModel, dict]] | None = None,
) -> None:
    """A Hugging Face folder with the text of its model card, and other models with their weights, `beside` it in folders of their names."""
    folder = Path(folder)
    model.save_pretrained(folder, state_dict=state_dict)
    tokenizer.save_pretrained(folder)
    for name, (other, state) in (beside or {}).items():
        other.save_pretrained(folder / name, state_dict=state)
        tokenizer.save_pretrained(folder / name)
    if card:
        (folder / "README.md").write_text(card, encoding="utf-8")
