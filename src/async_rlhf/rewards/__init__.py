"""Rewards: one interface, a module a kind. `load_reward` makes one from what the configuration names."""

from async_rlhf.rewards.base import Reward, Sample, check_reward, load_reward, rollout_samples, score_samples

__all__ = ["Reward", "Sample", "check_reward", "load_reward", "rollout_samples", "score_samples"]
