"""Tiny models and data, made once a test run. No download: HF_HUB_OFFLINE is set."""

import json
import os
import subprocess
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("WANDB_MODE", "offline")

import pytest
import torch
from transformers.utils import logging as transformers_logging

from async_rlhf.models import save_model, scratch_causal_lm, train_tokenizer

ROOT = Path(__file__).parent.parent
NOUNS = ("cat", "dog", "bird", "fish", "horse", "mouse", "snake", "whale")
VERBS = ("chases", "sees", "likes", "follows", "hears", "finds")
transformers_logging.disable_progress_bar()

LLAMA = dict(
    model_type="llama",
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)
GPT2 = dict(model_type="gpt2", n_embd=32, n_layer=2, n_head=2, n_positions=64)
NEOX = dict(
    model_type="gpt_neox",
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)


def sentences() -> list[dict]:
    """48 rows: `text` ends before the last noun, `answer` is that noun; lengths differ."""
    rows = []
    for i, noun in enumerate(NOUNS):
        for j, verb in enumerate(VERBS):
            tail = " and the ".join(NOUNS[: 1 + (i + j) % 3])
            rows.append({"text": f"The {noun} {verb} the {tail} near a", "answer": f" {NOUNS[(i + j) % 8]}.", "topic": noun})
    return rows


@pytest.fixture(scope="session")
def work(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="session")
def prompts_file(work) -> Path:
    path = work / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in sentences()))
    return path


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer((row["text"] + row["answer"] for row in sentences()), vocab_size=300, max_length=64)


@pytest.fixture(scope="session")
def model_folder(work, tokenizer) -> Path:
    """A Llama with fresh weights and tied embeddings."""
    folder = work / "llama"
    save_model(scratch_causal_lm(LLAMA, tokenizer, seed=0), tokenizer, folder)
    return folder


@pytest.fixture(scope="session")
def neox_folder(work, tokenizer) -> Path:
    """A GPT-NeoX with fresh weights and a head of its own."""
    folder = work / "neox"
    save_model(scratch_causal_lm(NEOX, tokenizer, seed=0), tokenizer, folder)
    return folder


@pytest.fixture(scope="session")
def reward_file(work) -> Path:
    """A reward function: the share of the response's characters that are an `a`, plus a little for its length."""
    path = work / "letter_reward.py"
    path.write_text("def letters(samples):\n    return [s.response.count('a') + len(s.response) / 100 for s in samples]\n")
    return path


def _run_script(script: str, *arguments: str, code: int = 0, timeout: float = 300, env: dict | None = None) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env={**os.environ, **(env or {})})
    assert done.returncode == code, f"{script} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done


@pytest.fixture(scope="session")
def run_script():
    """Runs a top-level script as a user would; returns the finished process. Its exit code must be `code`."""
    return _run_script


@pytest.fixture(autouse=True)
def _threads():
    """A run in this process may bind itself to cores and change the number of threads."""
    affinity, threads = os.sched_getaffinity(0), torch.get_num_threads()
    yield
    os.sched_setaffinity(0, affinity)
    torch.set_num_threads(threads)
