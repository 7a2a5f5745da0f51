"""A reward model whose weights are spread over the training processes: by DeepSpeed ZeRO-3 or by torch's FSDP2.

Its collectives need every rank. All of them meet before they compute, and whoever waits in vain for the others gets an error.
"""

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import AutoModel, PreTrainedConfig
from transformers.distributed import DistributedConfig

from async_rlhf import distributed
from async_rlhf.config import require
from async_rlhf.rewards.heads import RewardForward, loading_under


class Meeting:
    """Where all ranks meet before they score with the reward `name`. A rank waits `timeout` seconds for the others."""

    def __init__(self, name: str, timeout: float):
        self.name, self.timeout = name, timedelta(seconds=timeout)
        self.group = dist.new_group(backend="gloo", timeout=self.timeout)

    def hold(self, value: int) -> list[int]:
        """Every rank's value, in rank order.

        Raises:
            RuntimeError: called outside of the main thread, or some rank did not come; it names the reward and the ranks.
        """
        thread = threading.current_thread()
        if thread is not threading.main_thread():
            raise RuntimeError(
                f"reward {self.name} is sharded: it is scored on the main thread, where all collectives are, and not on {thread.name}"
            )
        try:
            dist.monitored_barrier(self.group, self.timeout, wait_all_ranks=True)
            values = [None] * dist.get_world_size()
            dist.all_gather_object(values, value, group=self.group)
        except RuntimeError as error:
            found = re.search(r"[Rr]anks? ([\d, ]+?) failed to pass", str(error))
            missing = f"rank {found[1]}" if found else "rank 0, or one that rank 0 waits for,"
            raise RuntimeError(
                f"reward {self.name} is sharded: every rank scores with it at the same time, also without samples. Rank {dist.get_rank()} "
                f"did, and {missing} did not come within {self.timeout.total_seconds():g} s"
            ) from error
        return values

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group(self.group)


@dataclass
class Shards:
    """How a reward model is spread over the ranks: `zero3`, with `offload` each rank's share in the CPU's memory, or `fsdp`."""

    sharding: Literal["zero3", "fsdp"]
    meeting: Meeting
    offload: bool = False

    def spread(
        self,
        load: Callable[..., RewardForward],
        config: PreTrainedConfig,
        dtype: torch.dtype,
        device: torch.device,
        trust_remote_code: bool,
    ) -> nn.Module:
        """The forward, of which this rank holds a share. `load(**settings of from_pretrained)` loads the model of `config`."""
        if self.sharding == "zero3":
            return self._zero3(load, config, dtype, device)
        return self._fsdp(load, config, device, trust_remote_code)

    def _zero3(self, load: Callable[..., RewardForward], config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """A DeepSpeed engine without optimizer, beside whatever engine the policy has. Weights are read through a map of the file, and
        only rank 0 copies them, one layer at a time."""
        import deepspeed  # late: it looks for devices and compilers

        found = deepspeed.get_accelerator().device_name()
        require(found == device.type, f"DeepSpeed computes on {found} and the run on {device.type}: set DS_ACCELERATOR")
        settings = zero3_config(config, dtype, self.offload, device.type)
        with loading_under(settings):
            scorer = load()
        engine, *_ = deepspeed.initialize(model=scorer, config=settings)
        engine.eval()
        return engine

    def _fsdp(
        self, load: Callable[..., RewardForward], config: PreTrainedConfig, device: torch.device, trust_remote_code: bool
    ) -> RewardForward:
        """Every rank reads its own share of each weight from the file: `transformers` shards while it loads."""
        found = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
        require(found == device.type, f"fsdp computes on {found} and the run on {device.type}")
        config.base_model_fsdp_plan = fsdp_plan(config, trust_remote_code)
        with loading_under(None):
            scorer = load(distributed_config=DistributedConfig(fsdp_size=distributed.world_size()))
        register_fsdp_forward_method(scorer.model, "read_last")
        return scorer


def zero3_config(model: PreTrainedConfig, dtype: torch.dtype, offload: bool, device: str) -> dict:
    """A DeepSpeed config for inference. Weights of under ten rows, norms and biases, stay whole: gathering them costs more."""
    stage = {"stage": 3, "stage3_param_persistence_threshold": 10 * model.get_text_config().hidden_size}
    if offload:
        stage["offload_param"] = {"device": "cpu", "pin_memory": device != "cpu"}
    types = {"bf16": {"enabled": dtype == torch.bfloat16}, "fp16": {"enabled": dtype == torch.float16}}
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": stage, **types}


def fsdp_plan(config: PreTrainedConfig, trust_remote_code: bool) -> dict[str, str]:
    """The parts of the base model that are gathered one at a time, and given back after use: embeddings and layers."""
    with torch.device("meta"):
        base = AutoModel.from_config(config, trust_remote_code=trust_remote_code)
    layers = set(base._no_split_modules or ())
    parts = [name for name, module in base.named_modules() if type(module).__name__ in layers or module is base.get_input_embeddings()]
    outer = [name for name in parts if not any(name.startswith(f"{other}.") for other in parts)]
    return dict.fromkeys(outer, "free_full_weight")
