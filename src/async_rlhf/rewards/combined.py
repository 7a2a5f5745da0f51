"""Several rewards as one: a weighted sum, every part kept by its name."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from async_rlhf.rewards.base import Reward, RewardSettings, Sample, score_samples


class Scores(NamedTuple):
    """`total [n]` is the weighted sum of `by_name`, each `[n]`, on the CPU. `observed`: what rewards noticed, as `reward/what`."""

    total: torch.Tensor
    by_name: dict[str, torch.Tensor]
    observed: dict[str, list[float]]


@dataclass
class RewardPart:
    """One reward of several, with its settings. `references` keeps the scores of completions of the data set, by prompt and text."""

    name: str
    settings: RewardSettings
    reward: Reward
    references: dict[tuple[str, str], float] = field(default_factory=dict)

    @property
    def collective(self) -> bool:
        return getattr(self.reward, "collective", False)

    def score(self, samples: Sequence[Sample]) -> torch.Tensor:
        """Scores `[n]`, less those of the references where the settings say so."""
        scores = self._ask(samples)
        if self.settings.relative:
            wanted = {(sample.prompt, sample.reference): sample for sample in samples}
            new = {key: _of_reference(sample, self.name) for key, sample in wanted.items() if key not in self.references}
            self.references |= zip(new, self._ask(list(new.values())).tolist(), strict=True)
            scores = scores - torch.tensor([self.references[sample.prompt, sample.reference] for sample in samples])
        return scores

    def _ask(self, samples: Sequence[Sample]) -> torch.Tensor:
        return score_samples(self.reward, samples, self.name) if samples or self.collective else torch.empty(0)


class RewardSet:
    """What the scripts score with. Every rank calls `score`, with no samples too: a collective reward needs them all."""

    def __init__(self, parts: Sequence[RewardPart]):
        self.parts = list(parts)

    @property
    def collective(self) -> bool:
        return any(part.collective for part in self.parts)

    def score(self, samples: Sequence[Sample]) -> Scores:
        """
        Raises:
            ValueError: a wrong number of scores or one that is not finite; it names the reward and the sample.
        """
        by_name = {part.name: part.score(samples) for part in self.parts}
        seen = {part.name: getattr(part.reward, "observed", dict)() for part in self.parts}
        return self.sum(by_name, {f"{name}/{what}": values for name, one in seen.items() for what, values in one.items()})

    def sum(self, by_name: dict[str, torch.Tensor], observed: dict[str, list[float]] | None = None) -> Scores:
        """Scores `[n]` by name, with their weighted sum."""
        return Scores(sum(part.settings.weight * by_name[part.name] for part in self.parts), by_name, observed or {})

    def state_dict(self) -> dict[str, list]:
        """Scores of the data set's completions, by reward: asked again in another batch, a model's would differ in the last digits."""
        return {part.name: [[*key, score] for key, score in dict(part.references).items()] for part in self.parts if part.references}

    def load_state_dict(self, state: dict[str, list]) -> None:
        for part in self.parts:
            part.references = {(prompt, text): score for prompt, text, score in state.get(part.name, [])}

    def close(self) -> None:
        for part in self.parts:
            getattr(part.reward, "close", lambda: None)()


def _of_reference(sample: Sample, name: str) -> Sample:
    if sample.reference is None:
        raise ValueError(f"reward {name}: relative needs the data set's own completion (completion_column, completion_template)")
    return Sample(sample.prompt, sample.reference, sample.prompt_ids, [], True, sample.columns, sample.group, sample.reference)
