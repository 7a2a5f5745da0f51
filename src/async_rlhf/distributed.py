"""The few collectives that the loop needs, over `torch.distributed` itself.

`Accelerator.num_processes` and its main-process test are wrong under DeepSpeed on a CPU, so they are not used here.
"""

import os
from typing import Any

import torch.distributed as dist


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    return rank() == 0


def launched_processes() -> int:
    """Training processes that the launcher started, known before they have met."""
    return int(os.environ.get("WORLD_SIZE", 1))


def is_main_by_environment() -> bool:
    """`is_main`, known before the processes have met."""
    return int(os.environ.get("RANK", 0)) == 0


def broadcast(value: Any) -> Any:
    """Rank 0's value, on every rank. It is pickled."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def all_gather(value: Any) -> list[Any]:
    """Every rank's value, in rank order, on every rank. Values are pickled."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def barrier() -> None:
    """Wait until every rank is here."""
    all_gather(None)


def all_sum(value: float) -> float:
    return float(sum(all_gather(float(value))))
