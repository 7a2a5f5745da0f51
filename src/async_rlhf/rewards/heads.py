"""A reward model's file as a sequence classifier with one output, whoever saved it and under whatever name its head stands there."""

import re
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import MethodType

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.integrations import deepspeed as zero
from transformers.modeling_utils import load_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from async_rlhf.config import require
from async_rlhf.models import length_mask

ENCODERS = {"bert", "roberta", "distilbert", "deberta", "deberta-v2", "electra", "albert", "mpnet", "xlm-roberta", "modernbert"}
# Of `transformers`, TRL's RewardTrainer and OpenRLHF; of TRL's former AutoModelForCausalLMWithValueHead; of OpenRLHF too; of UltraRM
HEADS = ("score", "v_head.summary", "value_head", "regression_head")


@dataclass(frozen=True)
class Head:
    """What the classifier's own head does not say: `name` is the head's in the file, and a score is (output + bias − mean) / std."""

    name: str = "score"
    bias: float = 0.0
    mean: float = 0.0
    std: float = 1.0


def find_head(path: str, config: PreTrainedConfig, name: str | None = None) -> Head:
    """The head in the weights at `path`, called `name` or as in `HEADS`. A decoder's `config` is told of its one output.

    OpenRLHF normalizes by `mean` and `std` of the config where `normalize_reward` is on there.

    Raises:
        UserError: no head, or one with several outputs.
        OSError: no weights.
    """
    if config.model_type in ENCODERS:
        require(config.num_labels == 1, f"reward model {path!r} gives {config.num_labels} scores; one is needed (num_labels: 1)")
        return Head()
    files = {tensor: file for file in weight_files(path) for tensor in load_state_dict(file, map_location="meta")}
    names = (name,) if name else HEADS
    found = next((name for name in names if any(tensor.startswith(f"{name}.") for tensor in files)), None)
    require(
        found,
        f"reward model {path!r}: no score head among its weights, which is called {' or '.join(names)}; if it has another name, set `head`",
    )
    last = max(tensor for tensor in files if tensor.startswith(f"{found}.") and tensor.endswith("weight"))  # of several layers the last
    outputs = len(load_state_dict(files[last], map_location="meta")[last])
    require(outputs == 1, f"reward model {path!r} gives {outputs} scores; one is needed (num_labels: 1)")
    config.num_labels = 1
    bias = load_state_dict(files[f"{found}.bias"])[f"{found}.bias"].item() if f"{found}.bias" in files else 0.0
    if getattr(config, "normalize_reward", False) and getattr(config, "std", None):
        return Head(found, bias, config.mean, config.std)
    return Head(found, bias)


def weight_files(path: str) -> list[str]:
    """The files that hold the weights of a folder or hub name.

    Raises:
        OSError: there are none.
    """
    for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME):
        try:
            file = cached_file(path, name)
        except OSError:
            continue
        return get_checkpoint_shard_files(path, file)[0] if name.endswith(".json") else [file]
    raise OSError(f"no {SAFE_WEIGHTS_NAME} and no {WEIGHTS_NAME} there")


def load_classifier(path: str, config: PreTrainedConfig, head: Head, **settings) -> PreTrainedModel:
    """The sequence classifier at `path`, its head taken from where `head` says. Every weight comes from the file.

    Raises:
        UserError: weights that are not in the file, and would be random.
    """
    renamed = {rf"^{re.escape(head.name)}\.": "score."} if head.name != "score" else None
    model, report = AutoModelForSequenceClassification.from_pretrained(
        path, config=config, key_mapping=renamed, output_loading_info=True, **settings
    )
    missing = sorted(report["missing_keys"])
    require(not missing, f"reward model {path!r}: {len(missing)} of its weights are not in the file and would be random: {missing[:3]}")
    return model


@contextmanager
def loading_under(config: dict | None) -> AbstractContextManager[None]:
    """In the block `from_pretrained` shards what it loads by a DeepSpeed ZeRO-3 config; with None it loads whole models. Afterwards it
    does what it did before: `transformers` keeps one such config for a whole process, which is the policy's."""
    before = zero._hf_deepspeed_config_weak_ref
    held = zero.HfDeepSpeedConfig(config) if config else None  # `transformers` has but a weak reference to it
    try:
        if held is None:
            zero.unset_hf_deepspeed_config()
        yield
    finally:
        zero._hf_deepspeed_config_weak_ref = before


class RewardForward(nn.Module):
    """The forward of a reward model: scores `[n]` of right-padded tokens `[n, L]`, an encoder's by its own forward, a decoder's read at
    the true last token."""

    def __init__(self, model: nn.Module, head: Head, is_encoder: bool):
        super().__init__()
        self.model, self.head, self.is_encoder = model, head, is_encoder
        model.read_last = MethodType(read_last, model)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        mask = length_mask(lengths, tokens.shape[1]).long()
        outputs = self.model(tokens, attention_mask=mask).logits if self.is_encoder else self.model.read_last(tokens, mask, lengths)
        own_bias = getattr(getattr(self.model, "score", None), "bias", None) is not None
        return (outputs[:, 0].float() + (0.0 if own_bias else self.head.bias) - self.head.mean) / self.head.std


def read_last(model: nn.Module, tokens: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """What a decoder's head says, `[n, 1]`, at the last of each row's `lengths [n]` tokens."""
    hidden = model.base_model(tokens, attention_mask=mask).last_hidden_state
    last = hidden[torch.arange(len(lengths), device=hidden.device), lengths - 1]
    return model.score(last.to(next(model.score.parameters()).dtype))
