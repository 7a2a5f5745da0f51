"""Rewards: one interface, a module a kind. `load_rewards` makes them from what the configuration names."""

from async_rlhf.rewards.base import Reward, RewardContext, Sample, rollout_samples, score_samples
from async_rlhf.rewards.combined import RewardSet, Scores
from async_rlhf.rewards.loading import load_rewards, read_rewards

__all__ = ["Reward", "RewardContext", "RewardSet", "Sample", "Scores", "load_rewards", "read_rewards", "rollout_samples", "score_samples"]
