"""Asynchronous, off-policy RLHF of language models."""
