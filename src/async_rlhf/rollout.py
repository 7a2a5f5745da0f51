"""The rollout record: one sampled completion and everything known about how it was sampled."""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Prompt:
    """One prompt as the generator gets it: where it stands in the prompt stream, its data-set row, its token ids."""

    position: int
    row: int
    ids: list[int]


@dataclass
class Rollout:
    """One completion of one prompt. The k samples of a prompt share `position` and differ in `sample`.

    `logprobs` holds the sampling policy's log-probability of each response token at the sampling temperature, and
    `versions` the snapshot that sampled each; both are as long as `response_ids`. `started` and `finished` are seconds
    of `time.perf_counter` in the generating process. `rewards` is what each reward gave it, by name, where it was scored in the pipeline.
    """

    position: int
    row: int
    sample: int
    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    started: float = 0.0
    finished: float = 0.0
    rewards: dict[str, float] | None = None

    def __post_init__(self):
        length = len(self.response_ids)
        if len(self.logprobs) != length or len(self.versions) != length:
            raise ValueError(
                f"rollout {self.position}/{self.sample}: {length} response tokens, {len(self.logprobs)} logprobs, "
                f"{len(self.versions)} versions; the three must be equal"
            )
        if self.finish_reason not in ("stop", "length"):
            raise ValueError(f"rollout {self.position}/{self.sample}: finish_reason {self.finish_reason!r}")


@dataclass
class RolloutBatch:
    """What the generator hands over for one update (`index` counts from 0), or for one evaluation.

    `version` is the newest snapshot it was sampled with, `mismatch` the engine-against-trainer difference measured when
    that snapshot was loaded, `restarts` how often the engine was started again by then; times are in seconds. `observed`: what rewards that
    scored it in the pipeline noticed, by name.
    """

    index: int
    rollouts: list[Rollout]
    version: int
    kind: str = "train"
    generate_seconds: float = 0.0
    weight_sync_seconds: float = 0.0
    generator_wait_seconds: float = 0.0
    mismatch: float | None = None
    observed: dict[str, list[float]] = field(default_factory=dict)
    restarts: int = 0


def batch_record(batch: RolloutBatch) -> dict:
    """The batch as JSON takes it."""
    return asdict(batch)


def read_batch(record: dict) -> RolloutBatch:
    """The batch that `batch_record` gave."""
    return RolloutBatch(**{**record, "rollouts": [Rollout(**rollout) for rollout in record["rollouts"]]})


def write_rollouts(path: str | os.PathLike, rollouts: Iterable[Rollout], **extra) -> None:
    """Append one JSON object a rollout; `extra` fields (say the update's index) go into each."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for rollout in rollouts:
            file.write(json.dumps({**extra, **asdict(rollout)}) + "\n")


def read_rollouts(path: str | os.PathLike) -> list[Rollout]:
    """The rollouts of a file that `write_rollouts` made; fields that are not a rollout's are left out."""
    names = Rollout.__dataclass_fields__
    with Path(path).open(encoding="utf-8") as file:
        return [Rollout(**{k: v for k, v in json.loads(line).items() if k in names}) for line in file]
