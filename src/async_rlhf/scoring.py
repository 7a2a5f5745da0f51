"""From rollouts to what an algorithm learns from: rewards, the missing-eos rule, log-probabilities of the reference."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from async_rlhf import distributed
from async_rlhf.algorithm import ScoredBatch
from async_rlhf.config import RLConfig
from async_rlhf.data import Encoder, PromptData
from async_rlhf.losses import penalize_missing_eos, sequence_sum
from async_rlhf.metrics import Metrics, append_json
from async_rlhf.models import length_mask, pad_tokens
from async_rlhf.reference import Reference
from async_rlhf.rewards import RewardSet, Scores, rollout_samples
from async_rlhf.rollout import Rollout, RolloutBatch


class Scorer:
    """Asks the rewards about training and held-out completions, and the reference about the former. All ranks call it together."""

    def __init__(
        self,
        config: RLConfig,
        rewards: RewardSet,
        reference: Reference,
        encoder: Encoder,
        prompts: dict[str, PromptData | None],
        device: torch.device,
    ):
        self.config, self.rewards, self.reference, self.encoder, self.device = config, rewards, reference, encoder, device
        self._prompts = prompts  # by the kind of batch, train and eval

    def score_in_pipeline(self, batch: RolloutBatch) -> None:
        """Give every rollout of the batch its `rewards`. Called on the main process, in the scoring thread."""
        _, by_name, batch.observed = self.rewards.score(self._samples(batch.rollouts, batch.kind))
        for i, rollout in enumerate(batch.rollouts):
            rollout.rewards = {name: float(scores[i]) for name, scores in by_name.items()}

    def score(
        self,
        update: int,
        groups: list[list[Rollout]],
        steps_behind: list[int],
        evaluate: Callable[..., Any],
        kl_coef: float,
        metrics: Metrics,
    ) -> ScoredBatch:
        """This rank's share of a batch. `evaluate(tokens, **options)` is what `ScoredBatch.evaluate` will ask."""
        config, flat = self.config, [rollout for group in groups for rollout in group]
        responses = [[rollout.response_ids for rollout in group] for group in groups]
        tokens = pad_tokens([group[0].prompt_ids for group in groups], responses, self.encoder.tokenizer.pad_token_id)
        tokens = {name: tensor.to(self.device) for name, tensor in tokens.items()}
        shape = tokens["response_ids"].shape
        mask = length_mask(tokens["response_length"], shape[-1])
        raw, by_name, observed = self._ask(flat, "train")
        finished = torch.tensor([rollout.finish_reason == "stop" for rollout in flat])
        scores = penalize_missing_eos(raw, finished, config.missing_eos_penalty, config.missing_eos_score).to(self.device)
        ref_logprobs = self.reference(tokens, config.temperature)
        padded = [[rollout.logprobs + [0.0] * (shape[-1] - len(rollout.logprobs)) for rollout in group] for group in groups]
        behaviour = torch.tensor(padded, device=self.device)

        metrics.observe("objective/score", scores.cpu(), std_name="objective/score_std")
        metrics.observe("rollout/response_length", [len(rollout.response_ids) for rollout in flat])
        metrics.observe("rollout/eos_frac", finished.float())
        for name, values in (by_name | observed).items():
            metrics.observe(f"reward/{name}", values)
        kl = sequence_sum(behaviour - ref_logprobs, mask).flatten()
        metrics.observe("objective/kl", kl.cpu())
        metrics.observe("objective/entropy", sequence_sum(-behaviour, mask).flatten().cpu())
        metrics.observe("objective/rlhf_reward", (scores - kl_coef * kl).cpu())
        behind = torch.tensor(steps_behind, device=self.device)
        scores = scores.view(shape[:2])
        return ScoredBatch(update, groups, tokens, mask, scores, behaviour, ref_logprobs, behind, partial(evaluate, tokens))

    def evaluate(self, batch: RolloutBatch, folder: Path) -> tuple[dict[str, float], list[dict]]:
        """The means of `eval/*` over held-out completions of all ranks, and the completions with their scores, which the main process
        also writes into `folder`."""
        mine = batch.rollouts[distributed.rank() :: distributed.world_size()]
        samples, scores = self._samples(mine, "eval"), self._ask(mine, "eval").total
        gathered = distributed.all_gather(
            [
                {"prompt": sample.prompt, "response": sample.response, "finished": sample.finished, "score": float(score)}
                for sample, score in zip(samples, scores, strict=True)
            ]
        )
        rows = [row for rank in gathered for row in rank]
        if distributed.is_main():
            folder.mkdir(exist_ok=True)
            for row in rows:
                append_json(folder / f"eval-{batch.version:06d}.jsonl", row)
        values = {
            "eval/score": float(np.mean([row["score"] for row in rows])),
            "eval/eos_frac": float(np.mean([row["finished"] for row in rows])),
            "eval/response_length": float(np.mean([len(rollout.response_ids) for rollout in batch.rollouts])),
        }
        return values, rows

    def _ask(self, rollouts: list[Rollout], kind: str) -> Scores:
        if not self.config.score_in_pipeline:
            return self.rewards.score(self._samples(rollouts, kind))
        names = [part.name for part in self.rewards.parts]
        return self.rewards.sum({name: torch.tensor([rollout.rewards[name] for rollout in rollouts]) for name in names})

    def _samples(self, rollouts: list[Rollout], kind: str) -> list:
        return rollout_samples(rollouts, self._prompts[kind].rows, self.encoder)
