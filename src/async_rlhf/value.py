"""The value model of PPO: a scalar head read in the state before each response token, beside the policy in one trained module."""

from pathlib import Path

import torch
import torch.nn.functional as F
from peft import PeftModel, get_peft_model
from torch import nn
from transformers import Cache

from async_rlhf.adapters import VALUE, TrunkClassifier, load_classifier, shares_base
from async_rlhf.config import ModelConfig, UserError, require
from async_rlhf.models import Policy, disable_dropout, lora_config, run_responses, trained_dtype


class ValueModel(nn.Module):
    """A sequence classifier with one output as value function: `forward` gives V before each response token, and after the last."""

    def __init__(self, model: nn.Module, share_prompts: bool = True):
        super().__init__()
        self.model, self.share_prompts = model, share_prompts

    def forward(
        self, prompt_ids: torch.Tensor, prompt_length: torch.Tensor, response_ids: torch.Tensor, response_length: torch.Tensor
    ) -> torch.Tensor:
        """`[p, k, R + 1]` for responses `[p, k, R]`: entry t is the value when t response tokens are said. Meaningless after the end."""
        values = run_responses(
            self._run, self.model, self.share_prompts, prompt_ids, prompt_length, response_ids, response_length, last=True
        )
        values = values[..., 0].view(*response_ids.shape[:2], -1)
        return F.pad(values, (0, response_ids.shape[-1] + 1 - values.shape[-1])).float()

    def _run(self, keep: int, **inputs) -> tuple[torch.Tensor, Cache | None]:
        classifier = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        output = classifier.base_model(**inputs)
        with torch.autocast(output.last_hidden_state.device.type, enabled=False):  # a value of 8 in bfloat16 is known to 0.03
            hidden = output.last_hidden_state[:, -keep:].to(next(classifier.score.parameters()).dtype)
            return classifier.score(hidden), output.past_key_values


class ActorCritic(nn.Module):
    """Policy and value model in one module, so that DDP, DeepSpeed and the optimizer see one."""

    def __init__(self, policy: Policy, value: ValueModel):
        super().__init__()
        self.policy, self.value = policy, value

    def forward(self, temperature: float = 1.0, values_only: bool = False, **tokens) -> tuple[torch.Tensor, ...]:
        """Log-probabilities `[p, k, R]` of the policy at `temperature`, left out with `values_only`, and values `[p, k, R + 1]`."""
        values = self.value(**tokens)
        return (values,) if values_only else (self.policy(**tokens, temperature=temperature), values)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """What trains, by whose it is: `policy` and `value`."""
        model = self.value.model
        own = {id(parameter) for parameter in (model.own_parameters() if isinstance(model, TrunkClassifier) else model.parameters())}
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return {
            "policy": [parameter for parameter in trained if id(parameter) not in own],
            "value": [parameter for parameter in trained if id(parameter) in own],
        }


def load_value_model(config: ModelConfig, path: str, vocabulary: int | None, mixed_precision: bool) -> nn.Module:
    """The classifier at `path`, a reward model, or a language model with a fresh head that says 0 everywhere; with LoRA, under an adapter.

    Raises:
        UserError: nothing loadable there, an encoder, several outputs, or fewer embeddings than `vocabulary`.
    """
    dtype = trained_dtype(config, mixed_precision)
    kwargs = {"attn_implementation": config.attn_implementation} if config.attn_implementation else {}
    if path == config.model_name_or_path:
        kwargs["revision"] = config.model_revision
    try:
        model, fresh = load_classifier(
            str(Path(path).expanduser()) if Path(path).exists() else path,
            num_labels=1,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            trust_remote_code=config.trust_remote_code,
            **kwargs,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"value_model_path {path!r}: {' '.join(str(error).split())[:300]}") from error
    require(hasattr(model, "score"), f"value_model_path {path!r}: an encoder reads whole texts, and has no value before each token")
    size = model.get_input_embeddings().num_embeddings
    require(vocabulary is None or size >= vocabulary, f"value_model_path {path!r}: {size} embeddings for the policy's {vocabulary}")
    if fresh:
        nn.init.zeros_(model.score.weight)
    disable_dropout(model)
    peft = lora_config(config)
    if peft:
        peft.task_type, peft.modules_to_save = "SEQ_CLS", ["score"]
        model = get_peft_model(model, peft)
    if getattr(config, "gradient_checkpointing", False):
        model.gradient_checkpointing_enable()
    return model


def value_on_trunk(config: ModelConfig, trunk: PeftModel, path: str | None) -> TrunkClassifier:
    """The value model as an adapter beside the policy's: the one at `path` with its head if that is one of the same base, or else a fresh
    one, under a head that says 0 everywhere.

    Raises:
        UserError: the adapter does not fit.
    """
    source = path if path and shares_base(path, config) else lora_config(config)
    try:
        return TrunkClassifier(trunk, VALUE, source, True, config.lora_dropout, config.trust_remote_code)
    except ValueError as error:
        raise UserError(f"value model on the trunk, from {path or 'a fresh adapter'}: {' '.join(str(error).split())[:300]}") from error
