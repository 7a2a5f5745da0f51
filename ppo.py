"""PPO with a value model, synchronous or asynchronous: token-level ratios, GAE, and the KL to the reference in the reward.

    python ppo.py --config configs/ppo_tiny.yml                      # one batch stale
    python ppo.py --config configs/ppo_tiny.yml --max_staleness 0    # the same, synchronous

Reward of token t: −kl_coef · (log μ − log π_ref), and the score with the last token (Ziegler et al. 2019). A unit of the loss is a
response token. Policy and value model train together; a checkpoint keeps the value model in its folder `value_model`.
"""

from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch

from async_rlhf import distributed
from async_rlhf.advantages import AdaptiveKL, RunningMoments, gae, step_mask, token_rewards, whiten
from async_rlhf.algorithm import Algorithm, ScoredBatch, Tensors
from async_rlhf.config import RLConfig, require, run_script, setting
from async_rlhf.losses import value_loss
from async_rlhf.metrics import Metrics, policy_metrics
from async_rlhf.models import TOKEN_FIELDS, Policy, length_mask
from async_rlhf.off_policy import OffPolicyConfig, corrected_loss
from async_rlhf.rewards import RewardSet
from async_rlhf.rewards.model import RewardModel
from async_rlhf.trainer import run_algorithm
from async_rlhf.value import ActorCritic, ValueModel, load_value_model, value_on_trunk


@dataclass
class PPOConfig(OffPolicyConfig, RLConfig):
    """The loop's settings, the ratio's, and PPO's own."""

    num_generations: int = setting(1, "Completions sampled a prompt.")
    loss_type: Literal["clip", "reinforce", "cispo"] = setting(
        "clip", "clip: PPO's clipped ratio; reinforce: no ratio; cispo: the clipped ratio as a weight, so that no token loses its gradient."
    )
    value_model_path: str | None = setting(
        None,
        "Where the value model starts: a folder or hub name. Default: the reward model that reads the policy's tokens, else the policy. "
        "With share_trunk: a LoRA adapter of model_name_or_path, or that itself for a fresh adapter; default: the reward's adapter if it "
        "is one, else a fresh one.",
    )
    share_trunk: bool = setting(
        False,
        "With use_peft: policy and value model, and a reward model that is a LoRA adapter of model_name_or_path, are adapters of one base "
        "in memory.",
    )
    vf_coef: float = setting(0.1, "Weight of the value loss.")
    value_clip_range: float | None = setting(0.2, "A value counts within this distance of the one before the update; null: any.")
    value_warmup_updates: int = setting(0, "First updates, in which the value model trains alone.")
    gamma: float = setting(1.0, "Discount a token.")
    lam: float = setting(0.95, "GAE's λ.")
    score_at: Literal["last_token", "next_token"] = setting(
        "last_token", "Which step gets the score: the last token's, or one after it with a value of its own (TRL's and torchtune's way)."
    )
    whiten_advantages: bool = setting(True, "Bring the batch's advantages to mean 0 and variance 1, over all processes.")
    whiten_rewards: bool = setting(False, "Bring the batch's token rewards to variance 1, keeping their mean.")
    normalize_scores: bool = setting(False, "Bring scores to mean 0 and deviation 1 by all that were seen so far.")
    score_clip: float | None = setting(None, "Scores are clipped to ± this, after normalising.")
    kl_coef: float = setting(0.05, "Weight of the KL to the reference in the reward; where `adaptive_kl_target` is set, its start.")
    adaptive_kl_target: float | None = setting(None, "KL, in nats a response, that kl_coef is steered to (Ziegler et al. 2019).")
    adaptive_kl_horizon: float = setting(10_000.0, "Episodes over which it is steered.")
    target_kl: float | None = setting(None, "Leave out an update's other epochs when the mean KL a token of one epoch is above this.")

    def __post_init__(self):
        super().__post_init__()
        for name in ("gamma", "lam"):
            require(0 <= getattr(self, name) <= 1, f"{name} {getattr(self, name)}: between 0 and 1")
        require(self.kl_coef >= 0, f"kl_coef {self.kl_coef}: 0 or more")
        for name in ("value_clip_range", "target_kl", "score_clip"):
            require(getattr(self, name) is None or getattr(self, name) > 0, f"{name} {getattr(self, name)}: above 0, or null")
        steered = self.adaptive_kl_target is not None
        for name in ("adaptive_kl_target", "adaptive_kl_horizon", "kl_coef"):
            require(not steered or getattr(self, name) > 0, f"{name} {getattr(self, name)}: above 0 where adaptive_kl_target is set")
        require(self.use_peft or not self.share_trunk, "share_trunk: adapters share a trunk, so it needs use_peft")
        self.check_correction(self.loss_type, "token")


class PPO(Algorithm):
    name = "ppo"

    def __init__(self, config: PPOConfig):
        super().__init__(config)
        self.controller = AdaptiveKL(config.kl_coef, config.adaptive_kl_target or 1.0, config.adaptive_kl_horizon)
        self.moments = RunningMoments()
        self.epoch_kl = [0.0, 0.0]  # sum over tokens, tokens

    @property
    def kl_coef(self) -> float:
        return self.controller.coef

    def module(self, policy: Policy, rewards: RewardSet, mixed_precision: bool) -> ActorCritic:
        config = self.config
        path, vocabulary = config.value_model_path, policy.vocabulary
        models = [part for part in rewards.parts if isinstance(part.reward, RewardModel) and part.reward.starts_values]
        if path is None and len(models) == 1:
            path, vocabulary = models[0].settings.model, None  # the same tokens, whatever the padding of the embeddings
        if config.share_trunk:
            value = value_on_trunk(config, policy.model, path)
        else:
            value = load_value_model(config, path or config.model_name_or_path, vocabulary, mixed_precision)
        return ActorCritic(policy, ValueModel(value, config.share_prompts))

    def models(self, module: ActorCritic) -> dict:
        return {"value_model": module.value.model}

    def state_dict(self) -> dict:
        return {"kl_coef": self.controller.coef, "moments": asdict(self.moments)}

    def load_state_dict(self, state: dict) -> None:
        self.controller, self.moments = replace(self.controller, coef=state["kl_coef"]), RunningMoments(**state["moments"])

    def make_batch(self, scored: ScoredBatch, metrics: Metrics) -> Tensors:
        """A row a prompt with its k responses: advantages a token, returns and values a step."""
        config, mask = self.config, scored.mask
        self.held = ("policy",) if scored.update < config.value_warmup_updates else ()
        self.epoch_kl = [0.0, 0.0]
        recompute = config.old_logprobs == "recompute"
        *old, values = scored.evaluate() if recompute else scored.evaluate(values_only=True)
        steps = step_mask(mask, config.score_at)
        values = values[..., : steps.shape[-1]]
        kl = torch.where(mask, scored.behaviour_logprobs - scored.ref_logprobs, 0.0)
        rewards = token_rewards(self._scores(scored), kl, mask, self.kl_coef, config.score_at)
        if config.whiten_rewards:
            rewards = whiten(rewards, steps, distributed.all_sum, keep_mean=True)
        advantages, returns = gae(rewards, values, steps, config.gamma, config.lam)
        advantages = torch.where(mask, advantages[..., : mask.shape[-1]], 0.0)
        metrics.mean("ppo/kl_coef", self.kl_coef, 1)
        metrics.mean("ppo/advantage_abs", advantages.abs().sum(), mask.sum())
        self._observe_values(values, returns, steps, metrics)
        if config.whiten_advantages:
            advantages = whiten(advantages, mask, distributed.all_sum)
        if config.adaptive_kl_target:
            episodes = distributed.all_sum(mask[..., 0].numel())
            self.controller = self.controller.update(distributed.all_sum(kl.sum()) / episodes, episodes)
        batch = scored.tokens | {"behaviour_logprobs": scored.behaviour_logprobs, "advantages": advantages}
        batch |= {"values": values, "returns": returns, "weight": mask.sum((1, 2)).float(), "steps_behind": scored.steps_behind}
        return batch | ({"old_logprobs": old[0]} if recompute else {})

    def _scores(self, scored: ScoredBatch) -> torch.Tensor:
        scores = scored.scores
        if self.config.normalize_scores:
            for moments in distributed.all_gather(RunningMoments.of(scores)):
                self.moments = self.moments.merge(moments)
            scores = self.moments.normalize(scores)
        return scores if self.config.score_clip is None else scores.clamp(-self.config.score_clip, self.config.score_clip)

    def _observe_values(self, values: torch.Tensor, returns: torch.Tensor, steps: torch.Tensor, metrics: Metrics) -> None:
        count = steps.sum()
        metrics.mean("value/mean", torch.where(steps, values, 0.0).sum(), count)
        metrics.mean("value/return", torch.where(steps, returns, 0.0).sum(), count)
        metrics.mean("value/error_squared", torch.where(steps, (returns - values).square(), 0.0).sum(), count)

    def loss(self, module: ActorCritic, rows: Tensors, metrics: Metrics) -> torch.Tensor:
        config = self.config
        logprobs, values = module(**{name: rows[name] for name in TOKEN_FIELDS}, temperature=config.temperature)
        mask = length_mask(rows["response_length"], logprobs.shape[-1])
        steps = step_mask(mask, config.score_at)
        tokens = mask.sum()
        policy = corrected_loss(config, config.loss_type, "token", logprobs, rows, mask, metrics).sum()
        losses, clipped = value_loss(values[..., : steps.shape[-1]], rows["values"], rows["returns"], steps, config.value_clip_range)
        value = torch.where(steps, losses, 0.0).sum()  # divided by tokens too: with next_token one step a response more
        metrics.mean("loss/policy", policy.detach(), tokens)
        metrics.mean("loss/value", value.detach(), steps.sum())
        metrics.mean("value/clip_frac", (clipped & steps).sum(), steps.sum())
        approx_kl = policy_metrics(metrics, logprobs, rows["behaviour_logprobs"], mask)
        self.epoch_kl[0] += float(approx_kl)
        self.epoch_kl[1] += float(tokens)
        return policy * (not self.held) + config.vf_coef * value

    def stops(self) -> bool:
        kl, tokens = (distributed.all_sum(part) for part in self.epoch_kl)
        self.epoch_kl = [0.0, 0.0]
        return self.config.target_kl is not None and kl > self.config.target_kl * tokens


def main() -> None:
    run_algorithm(PPOConfig, PPO)


if __name__ == "__main__":
    run_script(main)
