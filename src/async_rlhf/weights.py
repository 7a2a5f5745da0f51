"""Immutable, numbered weight snapshots: how the policy travels from the trainer to the generator.

The trainer publishes, the generation thread waits for a version and loads it; neither ever reads what the other is changing.
A snapshot is one safetensors file in shared memory (or in any folder that both sides see).
"""

import re
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from async_rlhf.reaper import Reaper

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Snapshot:
    """The policy after `version` updates, `optimizer_steps` optimizer steps in all.

    `path` is None when the generator samples from the training model itself. `probe_logprobs` are the trainer's own
    log-probabilities, at temperature 1, of `probe_ids[1:]`: what an engine must reproduce once it has loaded the snapshot.
    """

    version: int
    optimizer_steps: int
    path: Path | None = None
    probe_ids: list[int] = field(default_factory=list)
    probe_logprobs: list[float] = field(default_factory=list)


class WeightStore:
    """Publishes snapshots and keeps the newest `keep` of them, and any that is being read. Its folder goes when this process does."""

    def __init__(self, keep: int, folder: str | Path | None = None):
        parent = Path(folder) if folder else SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        self.folder = Path(tempfile.mkdtemp(prefix="async_rlhf-", dir=parent))
        self._reaper = Reaper(folder=self.folder)
        self._keep = keep
        self._snapshots: dict[int, Snapshot] = {}
        self._shapes: dict[str, torch.Size] | None = None
        self._reading: int | None = None
        self._changed = threading.Condition()

    def publish(
        self,
        version: int,
        optimizer_steps: int,
        named_tensors: Iterable[tuple[str, torch.Tensor]] | None,
        probe_ids: list[int] = (),
        probe_logprobs: list[float] = (),
    ) -> Snapshot:
        """Write the tensors (None: the generator shares the model) and make the snapshot known.

        Raises:
            ValueError: names or shapes differ from the first snapshot's; an engine would keep old weights or die.
        """
        path = None
        if named_tensors is not None:
            tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in named_tensors}
            shapes = {name: tensor.shape for name, tensor in tensors.items()}
            self._shapes = self._shapes or shapes
            if shapes != self._shapes:
                changed = sorted(set(shapes.items()) ^ set(self._shapes.items()))
                raise ValueError(f"snapshot {version}: names or shapes changed since the first one: {changed[:6]}")
            path = self.folder / f"{version}.safetensors"
            save_file(tensors, path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)
        snapshot = Snapshot(version, optimizer_steps, path, list(probe_ids), list(probe_logprobs))
        with self._changed:
            self._snapshots[version] = snapshot
            self._drop_old()
            self._changed.notify_all()
        return snapshot

    def latest(self) -> Snapshot:
        with self._changed:
            return self._snapshots[max(self._snapshots)]

    @contextmanager
    def reading(self, version: int, newest: bool, timeout: float, stop: threading.Event) -> Iterator[Snapshot]:
        """Wait until snapshot `version` exists, then hold it, or the newest one, for as long as the block runs.

        Raises:
            TimeoutError: it was not published within `timeout` seconds.
            InterruptedError: `stop` was set.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while not self._snapshots or max(self._snapshots) < version:
                if stop.is_set():
                    raise InterruptedError
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the trainer published no snapshot {version} within {timeout:.0f} s (generator_timeout)")
                self._changed.wait(0.2)
            chosen = max(self._snapshots) if newest else version
            self._reading = chosen
        try:
            yield self._snapshots[chosen]
        finally:
            with self._changed:
                self._reading = None
                self._drop_old()

    def _drop_old(self) -> None:
        for version in sorted(self._snapshots)[: -self._keep]:
            if version != self._reading:
                path = self._snapshots.pop(version).path
                if path:
                    path.unlink(missing_ok=True)

    def close(self) -> None:
        self._reaper.close()


def adapter_parameters(model: nn.Module, adapter: str) -> list[nn.Parameter]:
    """The LoRA weights of one adapter of a `peft` model."""
    return [parameter for name, parameter in model.named_parameters() if re.search(rf"\.lora_\w+\.{adapter}(\.|$)", name)]


def whole_weights(model: nn.Module, dtype: torch.dtype | None = None, adapter: str = "default") -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every weight as the plain checkpoint has it: tied weights once, the LoRA `adapter`, and no other, merged without
    touching the model."""
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}
    for name, parameter in model.named_parameters():
        if ".lora_" in name or ".original_module." in name:  # the latter has a trained copy beside it
            continue
        owner, _, leaf = name.rpartition(".base_layer.")
        if owner in layers and leaf == "weight" and adapter in layers[owner].scaling:
            parameter = parameter + layers[owner].get_delta_weight(adapter)
        plain = re.sub(r"\.modules_to_save\.\w+\.", ".", name.replace(".base_layer.", ".")).removeprefix("base_model.model.")
        yield plain, parameter.detach().to(dtype or parameter.dtype)


def plain_model(model: nn.Module) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The `transformers` model under an adapter, or the model itself, and its whole weights on the CPU: what `save_pretrained` takes."""
    if hasattr(model, "plain"):  # a classifier on a shared trunk
        return model.plain()
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base, {name: tensor.cpu() for name, tensor in whole_weights(model)}
