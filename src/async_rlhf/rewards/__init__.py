"""Rewards: one interface, a module a kind. `load_reward` makes one from what the configuration names."""

from async_rlhf.rewards.base import Reward, Sample, rollout_samples, score_samples
from async_rlhf.rewards.loading import check_reward, load_reward

__all__ = ["Reward", "Sample", "check_reward", "load_reward", "rollout_samples", "score_samples"]
