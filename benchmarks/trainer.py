"""Seconds an update and tokens a second of this trainer, prompts shared or not, and of TRL's Online DPO and RLOO doing the same work.

    python benchmarks/trainer.py                                       # everything: about an hour on 2 cores
    python benchmarks/trainer.py --shapes 64+32 --k 2                  # prompt + response tokens; completions a prompt
    python benchmarks/trainer.py --shapes 512+53 --updates 4 --no_compare_trl

A GPT-NeoX of 4 M parameters with fresh weights, prompts of random words, responses that all have the full length (the end of sequence
is an id that the model cannot say), the mean token id as reward, float32, `generate` of transformers. The shared and the plain path go
through the same rollouts: the learning rate is 0, so nothing moves, and that the scores agree is checked. TRL gets the same prompts.

Seconds are medians over the updates after the first. Scoring is the reward and the reference's forward; training the policy's forward,
backward and optimizer step. TRL does both in one: its training holds them, and is compared with both of the plain path. Tokens are
those of the responses, the last column of them over scoring and training. Online DPO trains on 2 of k. Nothing is left on disk.
"""

import gc
import importlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from async_rlhf.config import parse, require, run_script, setting
from async_rlhf.data import quiet_libraries
from async_rlhf.models import save_model, scratch_causal_lm, train_tokenizer
from async_rlhf.rewards import Sample
from async_rlhf.trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent
ALGORITHMS = {"online_dpo": "OnlineDPO", "rloo": "RLOO"}  # script and class; TRL's are called alike
VOCABULARY, LETTERS = 2048, "abcdefghijklmnopqrstuvwxyz"
MODEL = dict(model_type="gpt_neox", hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4)
COMMON = dict(temperature=0.7, learning_rate=0.0)
COLUMNS = (
    *("tokens", "k", "algorithm", "path", "s an update", "generating", "scoring", "training", "completions/s", "tokens/s"),
    *("generating, tokens/s", "training, tokens/s", "training × plain", "update × plain", "update × TRL"),
)


@dataclass
class BenchmarkConfig:
    shapes: list[str] = setting(["64+32", "512+53"], "Prompt and response tokens.")
    k: list[int] = setting([2, 4], "Completions a prompt. TRL's Online DPO has 2.")
    algorithms: list[str] = setting(list(ALGORITHMS), "online_dpo, rloo.")
    prompts: int = setting(32, "Prompts an update.")
    per_forward: int = setting(64, "Completions that a training forward holds at most; the rest of an update is accumulated.")
    updates: int = setting(6, "Updates a run, of which the first is not counted.")
    threads: int | None = setting(None, "Threads of torch. Default: one a core.")
    compare_trl: bool = setting(True, "Run TRL's trainers too.")

    def __post_init__(self):
        unknown = sorted(set(self.algorithms) - ALGORITHMS.keys())
        require(not unknown, f"algorithms {', '.join(unknown)}: some of {', '.join(ALGORITHMS)}")
        require(self.updates >= 2, f"updates {self.updates}: at least 2, since the first is not counted")
        for k in self.k:
            size = min(self.per_forward, self.prompts * k)
            fits = k >= 2 and self.prompts * k % size == 0 and size % k == 0
            require(fits, f"k {k}, per_forward {self.per_forward}, prompts {self.prompts}: k 2 or more, whole groups, forwards all full")
        for shape in self.shapes:
            require([part.isdigit() and int(part) > 0 for part in shape.split("+")] == [True] * 2, f"shape {shape!r}: such as 64+32")


@dataclass(frozen=True)
class Work:
    """What every trainer is given."""

    algorithm: str
    model: Path
    prompts: list[str]  # of all updates
    prompt_tokens: int
    response_tokens: int
    k: int
    updates: int
    completions: int  # an update
    per_forward: int
    threads: int

    def __str__(self) -> str:
        return f"{ALGORITHMS[self.algorithm]}, {self.prompt_tokens}+{self.response_tokens}, k {self.k}"


@dataclass(frozen=True)
class Seconds:  # medians; `score` is 0 where it is part of `train`
    update: float
    generate: float
    train: float
    score: float = 0.0


def mean_id(samples: Sequence[Sample] = (), completion_ids: Sequence[list[int]] = (), **others) -> list[float]:
    """The reward, of our samples or of what TRL gives."""
    return [sum(ids) / len(ids) / VOCABULARY for ids in [*(sample.response_ids for sample in samples), *completion_ids]]


def make_model(folder: Path, positions: int) -> list[str]:
    """Save a model and its tokenizer; returns words, each of which is one token wherever it stands."""
    draw = random.Random(0)
    texts = (" ".join("".join(draw.choices(LETTERS, k=3)) for _ in range(8)) for _ in range(2000))
    tokenizer = train_tokenizer(texts, VOCABULARY, positions)
    words = [" " + word[1:] for word in sorted(tokenizer.get_vocab()) if word[0] == "Ġ" and len(word) > 2]
    tokenizer.add_special_tokens({"eos_token": "<never>"})  # its id is VOCABULARY, so the model has no logit for it
    model = scratch_causal_lm(MODEL | {"vocab_size": VOCABULARY, "max_position_embeddings": positions}, tokenizer, seed=0)
    save_model(model, tokenizer, folder)
    return [word for word in words if len(tokenizer(word)["input_ids"]) == 1]


def run_ours(work: Work, share_prompts: bool) -> tuple[Seconds, list[float]]:
    """Seconds, and the mean score of every update."""
    sys.path[:0] = [] if str(ROOT) in sys.path else [str(ROOT)]
    script, name = importlib.import_module(work.algorithm), ALGORITHMS[work.algorithm]
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in work.prompts))
    data = dict(dataset_name="prompts.jsonl", max_prompt_length=work.prompt_tokens, reward_model_path=f"{Path(__file__).resolve()}:mean_id")
    sampling = COMMON | dict(generator="hf", hf_generation_batch_size=work.completions, response_length=work.response_tokens)
    batch = dict(per_device_train_batch_size=work.per_forward, gradient_accumulation_steps=work.completions // work.per_forward)
    run = dict(output_dir="run", overwrite_output_dir=True, max_staleness=0, total_episodes=work.updates * work.completions, save_steps=1e9)
    config = getattr(script, f"{name}Config")(
        **data | sampling | batch | run, model_name_or_path=str(work.model), num_generations=work.k, share_prompts=share_prompts
    )
    trainer = Trainer(config, getattr(script, name)(config))
    torch.set_num_threads(work.threads)  # the trainer took all cores
    trainer.run()
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    if any(record["rollout/tokens"] != work.completions * work.response_tokens for record in records):
        raise RuntimeError(f"{work}: a response does not have the full length")
    parts = ("update", "generate", "train", "score")
    return Seconds(*(median(record[f"time/{part}"] for record in records[1:]) for part in parts)), [
        record["objective/score"] for record in records
    ]


class Stopwatch(TrainerCallback):
    """Times every step of a TRL trainer, from its beginning to its end, and `generate` in it."""

    def __init__(self, model):
        self.steps, self.generate = [], model.generate
        model.generate = self.timed_generate

    def timed_generate(self, *args, **kwargs):
        started = time.perf_counter()
        output = self.generate(*args, **kwargs)
        self.generating += time.perf_counter() - started
        return output

    def on_step_begin(self, *args, **kwargs):
        self.started, self.generating = time.perf_counter(), 0.0

    def on_step_end(self, *args, **kwargs):
        seconds = time.perf_counter() - self.started
        self.steps.append((seconds, self.generating, seconds - self.generating))


def run_trl(work: Work) -> Seconds:
    """TRL's trainer of the same name. Online DPO's batch counts prompts, RLOO's completions."""
    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32)
    watch = Stopwatch(model)
    if work.algorithm == "online_dpo":
        from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

        classes = OnlineDPOConfig, OnlineDPOTrainer
        own = dict(max_new_tokens=work.response_tokens, max_length=work.prompt_tokens + work.response_tokens)
    else:
        classes = trl.RLOOConfig, trl.RLOOTrainer
        own = dict(max_completion_length=work.response_tokens, num_generations=work.k)
    quiet = dict(output_dir="trl", save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True)
    settings = COMMON | dict(use_cpu=not torch.cuda.is_available(), bf16=False, gradient_checkpointing=False)
    rows = work.per_forward // (2 if work.algorithm == "online_dpo" else 1)
    batch = dict(per_device_train_batch_size=rows, gradient_accumulation_steps=work.completions // work.per_forward, max_steps=work.updates)
    args, prompts = classes[0](**own | quiet | settings | batch), Dataset.from_dict({"prompt": work.prompts})
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    trainer = classes[1](model, reward_funcs=mean_id, args=args, train_dataset=prompts, processing_class=tokenizer, callbacks=[watch])
    torch.set_num_threads(work.threads)
    trainer.train()
    return Seconds(*(median(seconds) for seconds in zip(*watch.steps[1:], strict=True)))


def measure(work: Work, compare_trl: bool) -> tuple[dict[str, Seconds], str]:
    """Seconds by path: shared, plain, and TRL where it runs; why it does not is the second."""
    (shared, scores), (plain, same) = run_ours(work, True), run_ours(work, False)
    if scores != same:
        raise RuntimeError(f"{work}: the two paths had other rollouts")
    results = {"shared": shared, "plain": plain}
    if not compare_trl or (work.algorithm == "online_dpo" and work.k != 2):
        return results, f"{work}: TRL's Online DPO samples 2 completions a prompt, never more." * compare_trl
    try:
        return results | {"TRL": run_trl(work)}, ""
    except Exception as error:  # a comparison that fails is no reason to lose the others
        return results, f"{work}: TRL's trainer fails: {type(error).__name__}: {' '.join(str(error).split())[:300]}"


def lines(work: Work, results: dict[str, Seconds]) -> list[str]:
    """A line a path. A ratio says how many times faster than the other it is."""
    plain, table = results["plain"], []
    for path, s in results.items():
        trains = plain.train / s.train if s.score else (plain.score + plain.train) / s.train
        rates = [work.completions * work.response_tokens / seconds for seconds in (s.update, s.generate, s.score + s.train)]
        cells = [f"{work.prompt_tokens}+{work.response_tokens}", str(work.k), ALGORITHMS[work.algorithm], path]
        cells += [f"{s.update:.3f}", f"{s.generate:.3f}", f"{s.score:.3f}" if s.score else "–", f"{s.train:.3f}"]
        cells += [f"{work.completions / s.update:.2f}", *(f"{rate:.0f}" for rate in rates)]
        cells += [f"{trains:.2f}", f"{plain.update / s.update:.2f}", f"{results['TRL'].update / s.update:.2f}" if "TRL" in results else "–"]
        table.append(f"| {' | '.join(cells)} |")
    return table


def benchmark(config: BenchmarkConfig) -> str:
    """The table, what did not run, and a line about the machine. Progress goes to stderr."""
    threads = config.threads or len(os.sched_getaffinity(0))
    table, notes = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)], []
    shapes = [tuple(map(int, shape.split("+"))) for shape in config.shapes]
    with tempfile.TemporaryDirectory() as folder, chdir(folder), redirect_stdout(sys.stderr):
        model, draw = Path(folder, "model"), random.Random(1)
        words = make_model(model, max(map(sum, shapes)))
        parameters = AutoModelForCausalLM.from_pretrained(model).num_parameters()
        for (prompt, response), k, algorithm in product(shapes, config.k, config.algorithms):
            prompts = ["".join(draw.choices(words, k=prompt)) for _ in range(config.prompts * config.updates)]
            sizes = config.prompts * k, min(config.per_forward, config.prompts * k)
            work = Work(algorithm, model, prompts, prompt, response, k, config.updates, *sizes, threads)
            results, note = measure(work, config.compare_trl)
            table += lines(work, results)
            notes += [note] if note else []
            print("\n".join([*table[-len(results) :], note]), flush=True)
            gc.collect()
    versions = ", ".join(f"{module.__name__} {module.__version__}" for module in (torch, transformers, trl))
    machine = f"{os.cpu_count()} cores, {threads} threads, {versions}"
    sizes = f"{parameters / 1e6:.1f} M parameters, {config.prompts} prompts an update, at most {config.per_forward} completions a forward"
    return "\n".join([*table, "", *notes, f"{machine}; {sizes}, {config.updates} updates."])


def main() -> None:
    config = parse(BenchmarkConfig)
    quiet_libraries()
    print(benchmark(config))


if __name__ == "__main__":
    run_script(main)
