"""LoRA adapters: several on one frozen base, each a model of its own, and folders that hold one."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from peft import (
    AutoPeftModelForSequenceClassification,
    LoraConfig,
    PeftConfig,
    PeftModel,
    get_peft_model_state_dict,
    load_peft_weights,
    set_peft_model_state_dict,
)
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from async_rlhf.config import ModelConfig, UserError, require
from async_rlhf.weights import adapter_parameters, whole_weights

VALUE, REWARD = "value", "reward"  # beside the policy's, which `peft` calls "default"
NO_HEAD = "the adapter has no score head: train it with modules_to_save: [score]"


@contextmanager
def adapter(model: PeftModel, name: str | None) -> Iterator[None]:
    """In the block `model` computes with its adapter `name` alone; with None, as the bare base.

    Afterwards it is as before: the same adapter chosen, and every adapter that trains with its gradients, which `peft` takes from all
    but the chosen one. A graph made in the block goes backward outside of it: a tensor whose flag is down gets no gradient.
    """
    active = model.active_adapter
    if name == active:
        yield
        return
    try:
        with model.disable_adapter() if name is None else nullcontext():
            if name is not None:
                model.set_adapter(name)
            yield
    finally:
        model.set_adapter(active)
        model.set_requires_grad([other for other, config in model.peft_config.items() if not config.inference_mode])


def checkpoint_activations(model: PeftModel) -> None:
    """Gradient checkpointing. What the backward pass computes anew has the adapter of its forward, whichever is chosen by then."""
    model.gradient_checkpointing_enable(
        {"use_reentrant": False, "context_fn": lambda: (nullcontext(), adapter(model, model.active_adapter))}
    )


# -- folders that hold an adapter ----------------------------------------------------------------------------------------


def adapter_config(path: str) -> PeftConfig | None:
    """What a PEFT folder or hub name says of its adapter; None where there is none."""
    folder = Path(path).expanduser()
    if folder.exists() and not (folder / "adapter_config.json").is_file():
        return None
    try:
        return PeftConfig.from_pretrained(str(folder) if folder.exists() else path)
    except ValueError:
        return None


def is_base(path: str | None, config: ModelConfig) -> bool:
    """Whether `path` is the model that the policy starts from."""
    if path is None or path == config.model_name_or_path:
        return path is not None
    here, there = (Path(name).expanduser() for name in (path, config.model_name_or_path))
    return here.exists() and here.resolve() == there.resolve()


def shares_base(path: str, config: ModelConfig) -> bool:
    """Whether `path` holds an adapter of the model that the policy starts from."""
    found = adapter_config(path)
    return found is not None and is_base(found.base_model_name_or_path, config) and (found.revision or "main") == config.model_revision


def load_classifier(path: str, **settings) -> tuple[PreTrainedModel, bool]:
    """A sequence classifier at `path`, a folder or hub name, and whether its head is a fresh one. An adapter's, with one output, comes
    with its base, and is merged into it.

    Raises:
        OSError, ValueError, RuntimeError: nothing loadable there.
    """
    found = adapter_config(path)
    if found is None:
        model, report = AutoModelForSequenceClassification.from_pretrained(path, output_loading_info=True, **settings)
        return model, any(name.startswith("score") for name in report["missing_keys"])
    heads = [name for name in load_peft_weights(path, device="cpu") if ".score." in name or ".classifier." in name]
    require(heads, NO_HEAD)
    base_config(found)
    return AutoPeftModelForSequenceClassification.from_pretrained(path, **{**settings, "num_labels": 1}).merge_and_unload(), False


def base_config(adapter: PeftConfig, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The config of an adapter's base.

    Raises:
        UserError: the base does not load.
    """
    base = adapter.base_model_name_or_path
    try:
        return AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(
            f"it is an adapter of {base!r}, which does not load; mend base_model_name_or_path in its adapter_config.json "
            f"({' '.join(str(error).split())[:150]})"
        ) from error


# -- classifiers on a shared trunk ---------------------------------------------------------------------------------------


class TrunkClassifier(nn.Module):
    """A sequence classifier with one output that is adapter `name` of `trunk`, a causal LM that others use too, and a head of its own.

    It answers where a `transformers` classifier is asked: `base_model`, `score`, `config`, `device`. The trunk runs in this module's
    mode, training or evaluation, and then returns to its own.
    """

    def __init__(
        self, trunk: PeftModel, name: str, source: LoraConfig | str, train: bool, lora_dropout: float | None = None, remote: bool = False
    ):
        """`source`: the settings of a fresh adapter, under a head that says 0 everywhere, or a PEFT folder that holds one, and then
        `lora_dropout` is in place of its own. `train` says whether it trains, `remote` whether code that comes with the model may run.

        Raises:
            UserError: the folder's adapter does not fit, or there is no classifier of the trunk's kind.
        """
        super().__init__()
        base = trunk.get_base_model()
        self.trunk, self.name, self.remote = trunk, name, remote
        self.config = copy.deepcopy(base.config)
        self.config.num_labels = 1
        try:
            head = self._shell().score
        except (ValueError, AttributeError) as error:
            raise UserError(f"share_trunk: transformers has no decoder with a score head for {self.config.model_type!r}") from error
        self.score = nn.Linear(head.in_features, 1, bias=head.bias is not None)
        for parameter in self.score.parameters():
            nn.init.zeros_(parameter.requires_grad_(train))
        if isinstance(source, str):
            self._load(source, train, lora_dropout)
        else:
            self._add(source, train)
        self.train(train)

    def train(self, mode: bool = True) -> "TrunkClassifier":
        """Leaves the trunk's mode alone."""
        self.training = mode
        return self

    @property
    def device(self) -> torch.device:
        return self.trunk.device

    @property
    def is_gradient_checkpointing(self) -> bool:
        return self.trunk.is_gradient_checkpointing

    def own_parameters(self) -> list[nn.Parameter]:
        return [*adapter_parameters(self.trunk, self.name), *self.score.parameters()]

    def base_model(self, *args, **inputs):
        """What the body gives, the hidden states and the cache, with the adapter in it."""
        mode = self.trunk.training
        if mode != self.training:
            self.trunk.train(self.training)
        try:
            with adapter(self.trunk, self.name):
                return self.trunk.get_base_model().base_model(*args, **inputs)
        finally:
            if mode != self.training:
                self.trunk.train(mode)

    def plain(self) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
        """The same as a `transformers` classifier without memory, and its whole weights on the CPU: what `save_pretrained` takes."""
        shell = self._shell()
        body = whole_weights(self.trunk, adapter=self.name)
        state = {name: tensor.cpu() for name, tensor in body if name.startswith(f"{shell.base_model_prefix}.")}
        return shell, state | {f"score.{name}": tensor.detach().cpu() for name, tensor in self.score.named_parameters()}

    def _shell(self) -> PreTrainedModel:
        dtype = self.trunk.get_base_model().dtype
        with torch.device("meta"):
            return AutoModelForSequenceClassification.from_config(self.config, dtype=dtype, trust_remote_code=self.remote)

    def _add(self, config: LoraConfig, train: bool) -> None:
        """The heads of the language model get no adapter, and what `config` asks to save whole is our own head alone."""
        base = self.trunk.get_base_model()
        heads = {name for name, _ in base.named_children()} - {base.base_model_prefix}
        if isinstance(config.target_modules, list | set):
            config.target_modules = {name for name in config.target_modules if name.split(".")[-1] not in heads}
        config.modules_to_save, config.inference_mode = None, not train
        self.trunk.add_adapter(self.name, config)
        if train:
            self.trunk.set_requires_grad(self.name)

    def _load(self, path: str, train: bool, lora_dropout: float | None) -> None:
        config, weights = adapter_config(path), load_peft_weights(path, device="cpu")
        lora = {name: tensor for name, tensor in weights.items() if ".lora_" in name}
        head = {name.split(".")[-1]: tensor for name, tensor in weights.items() if ".score." in name}
        others = [name for name in weights if ".lora_" not in name and ".score." not in name]
        plain = config.peft_type == "LORA" and config.bias == "none" and config.init_lora_weights in (True, False, "gaussian")
        require(plain and not others, f"besides LoRA it changes the base, which others share {others[:1]}")
        require(head, NO_HEAD)
        config.lora_dropout = config.lora_dropout if lora_dropout is None else lora_dropout
        self._add(config, train)
        made = get_peft_model_state_dict(self.trunk, adapter_name=self.name, save_embedding_layers=False)
        for ours, theirs in ((made, lora), (self.score.state_dict(), head)):
            wrong = {(name, tensor.shape) for name, tensor in ours.items()} ^ {(name, tensor.shape) for name, tensor in theirs.items()}
            require(not wrong, f"it does not fit the trunk: {sorted(name for name, _ in wrong)[:1]}")
        set_peft_model_state_dict(self.trunk, lora, adapter_name=self.name)
        self.score.load_state_dict(head)
