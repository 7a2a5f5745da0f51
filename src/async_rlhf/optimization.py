"""Optimizer steps on the trained module, under DDP or DeepSpeed ZeRO-2, in full or mixed precision."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import InitProcessGroupKwargs
from torch import nn
from transformers import get_scheduler

from async_rlhf import distributed
from async_rlhf.algorithm import Tensors
from async_rlhf.config import RLConfig, require
from async_rlhf.trackers import wanted

SHARDS = "zero"  # folder of what the ranks save under ZeRO


def open_accelerator(config: RLConfig) -> Accelerator:
    """Accelerate's processes, precision and trackers. Where the configuration names no precision, `accelerate launch` decides.

    Raises:
        UserError: float16 on a CPU, FSDP, ZeRO-3.
    """
    require(torch.cuda.is_available() or not config.fp16, "fp16 needs a GPU; on a CPU train in float32")
    precision = "bf16" if config.bf16 else "fp16" if config.fp16 else None
    patience = timedelta(seconds=config.generator_timeout + 600)  # ranks wait for rank 0, which may wait for the generator
    accelerator = Accelerator(
        mixed_precision=precision,
        log_with=wanted(config.report_to) or None,
        project_dir=config.output_dir,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=patience)],
    )
    require(accelerator.distributed_type != DistributedType.FSDP, "the RL loop does not run under FSDP yet: use DDP or ZeRO-2")
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        plugin = accelerator.state.deepspeed_plugin
        require(plugin.zero_stage <= 2, f"the RL loop does not run under ZeRO-{plugin.zero_stage} yet: use ZeRO-2 or DDP")
        size = config.per_device_train_batch_size
        plugin.deepspeed_config.update(
            train_micro_batch_size_per_gpu=size,
            train_batch_size=size * distributed.world_size(),  # Accelerate miscounts its processes on a CPU
            gradient_accumulation_steps=1,  # `ModuleOptimizer` says which forward is the last of a step
            gradient_clipping=config.max_grad_norm,
        )
    return accelerator


def sharding(accelerator: Accelerator) -> str:
    """How the optimizer is spread over the processes, for the run's record."""
    deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    return f"ZeRO-{accelerator.state.deepspeed_plugin.zero_stage}" if deepspeed else "none"


class ModuleOptimizer:
    """The trained module with AdamW and its schedule. `module` is what losses call; `steps` counts the optimizer steps taken.

    A module of several parts gives them as `parameter_groups()`, trained parameters by name; any other is the part `policy`.
    """

    def __init__(self, accelerator: Accelerator, config: RLConfig, module: nn.Module, total_steps: int):
        self.accelerator, self.max_grad_norm = accelerator, config.max_grad_norm
        self.deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
        betas = (config.adam_beta1, config.adam_beta2)
        if hasattr(module, "parameter_groups"):
            parts = module.parameter_groups()
        else:
            parts = {"policy": [parameter for parameter in module.parameters() if parameter.requires_grad]}
        groups = [{"params": parameters, "part": part} for part, parameters in parts.items()]
        optimizer = torch.optim.AdamW(groups, config.learning_rate, betas, config.adam_epsilon, config.weight_decay)
        self.adamw = optimizer  # under DeepSpeed too: its groups then hold this process's share
        self.module, self.optimizer = accelerator.prepare(module, optimizer)
        self.scheduler = get_scheduler(config.lr_scheduler_type, optimizer, config.warmup_steps, total_steps)
        self.steps = 0
        self.learning_rate = config.learning_rate

    @property
    def unwrapped(self) -> nn.Module:
        """The module as the algorithm made it."""
        return self.accelerator.unwrap_model(self.module)

    @property
    def model(self):
        """The policy's own `transformers` (or `peft`) model."""
        return self.unwrapped.policy.model

    @property
    def dtype(self) -> torch.dtype:
        """The type that the policy computes in, so that the engine samples in it too."""
        names = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return names.get(self.accelerator.mixed_precision, next(self.model.parameters()).dtype)

    def step(
        self, forwards: Sequence[Tensors], units: float, loss: Callable[[nn.Module, Tensors], torch.Tensor], held: Collection[str] = ()
    ) -> None:
        """One step along the gradient of the mean over `units`, the number of things to learn from in the forwards of all ranks;
        `loss(module, rows)` is summed over its rows. Without a unit only the schedule moves on. The parts `held`, whose gradient is to be
        0, and which have not trained before, stay as they are.

        Raises:
            FloatingPointError: a gradient that is not finite.
        """
        if units:
            with self._hold(held):
                for i, rows in enumerate(forwards):
                    last = i == len(forwards) - 1
                    # DDP and DeepSpeed average over ranks, so the sum is taken times their number
                    if self.deepspeed:
                        self.module.set_gradient_accumulation_boundary(last)
                        self.module.backward(loss(self.module, rows) * distributed.world_size() / units)
                        self.module.step()
                    else:
                        with nullcontext() if last else self.accelerator.no_sync(self.module):
                            self.accelerator.backward(loss(self.module, rows) * distributed.world_size() / units)
                self._check_and_step()
        self.pass_step()

    def state_dict(self) -> dict:
        """Trained parameters, optimizer, schedule and scaler; under ZeRO those that the engine does not save by itself."""
        state = {"steps": self.steps, "learning_rate": self.learning_rate, "scheduler": self.scheduler.state_dict()}
        if not self.deepspeed:
            scaler = self.accelerator.scaler
            state |= {
                "module": self._trained(),
                "optimizer": self.optimizer.state_dict(),
                "scaler": scaler.state_dict() if scaler else None,
            }
        return state

    def load_state_dict(self, state: dict) -> None:
        self.steps, self.learning_rate = state["steps"], state["learning_rate"]
        self.scheduler.load_state_dict(state["scheduler"])
        if self.deepspeed:
            return
        trained = self._trained()
        if state["module"].keys() != trained.keys():
            raise ValueError(f"the checkpoint's parameters are not the module's: {sorted(state['module'].keys() ^ trained.keys())[:6]}")
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(state["module"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        if state["scaler"]:
            self.accelerator.scaler.load_state_dict(state["scaler"])

    def save_shards(self, folder: Path) -> None:
        """On every rank: what only the ranks together know."""
        if self.deepspeed:
            self.module.save_checkpoint(str(folder), tag=SHARDS)

    def load_shards(self, folder: Path) -> None:
        if self.deepspeed:
            found, _ = self.module.load_checkpoint(str(folder), tag=SHARDS)
            if found is None:
                raise ValueError(f"DeepSpeed finds no checkpoint {SHARDS} in {folder}")

    def _trained(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.unwrapped.named_parameters() if parameter.requires_grad}

    @contextmanager
    def _hold(self, parts: Collection[str]) -> Iterator[None]:
        """No step, no decay, and nothing counted: AdamW's first step on the parts is still to come afterwards."""
        held = [(group, group["lr"]) for group in self.adamw.param_groups if group["part"] in parts]
        for group, _ in held:
            group["lr"] = 0.0
        yield
        for group, rate in held:
            group["lr"] = rate
            for parameter in group["params"]:
                self.adamw.state.pop(parameter, None)

    def pass_step(self) -> None:
        """Count a step, and move the schedule on."""
        self.steps += 1
        self.learning_rate = self.optimizer.param_groups[0]["lr"]
        self.scheduler.step()

    def _check_and_step(self) -> None:
        scaled = self.accelerator.mixed_precision == "fp16"  # a scaler skips the steps whose gradient overflows
        if self.deepspeed:  # which has clipped and stepped; a NaN then reaches neither a snapshot nor a checkpoint
            norm = None if scaled else self.module.get_global_grad_norm()
        else:
            norm = self.accelerator.clip_grad_norm_(self.module.parameters(), self.max_grad_norm)
        if not scaled:
            require_finite(norm, self.steps)
        if not self.deepspeed:
            self.optimizer.step()
            self.optimizer.zero_grad()


def require_finite(norm: torch.Tensor | float | None, step: int) -> None:
    """Raise `FloatingPointError` before a NaN is published or saved."""
    if norm is not None and not bool(torch.isfinite(torch.as_tensor(float(norm)))):
        raise FloatingPointError(f"the gradient of optimizer step {step} is {float(norm)}; no weights are saved of it: lower learning_rate")
