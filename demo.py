"""The whole pipeline on function docstrings, from an SFT policy to a table, on 2 CPU cores: what `make demo` runs.

    python demo.py                       # asynchronous Online DPO, one batch off-policy, vLLM beside the trainer
    python demo.py --max_staleness 0     # the same, synchronous
    python demo.py --generator hf        # the same, sampled by transformers
    python demo.py --from_scratch        # makes the SFT policy first (about half an hour)

Every stage is one of the project's own scripts with a config of its own, started as a user would start it; the commands are printed.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from async_rlhf.config import parse, require, run_script, setting
from async_rlhf.stages import run_stages, summarize

ROOT = Path(__file__).parent.resolve()


@dataclass
class DemoConfig:
    output_dir: str = setting("results/demo", "Folder of everything that the demo makes.")
    max_staleness: int = setting(1, "Batches that generation may run ahead of training; 0 is synchronous.")
    generator: Literal["vllm", "hf"] = setting("vllm", "What samples during Online DPO.")
    from_scratch: bool = setting(False, "Train the SFT policy too, instead of starting from checkpoints/sft_docstrings.")
    seed: int = setting(1, "Seed of Online DPO.")
    total_episodes: int | None = setting(None, "Completions that Online DPO trains on. Default: that of configs/onlinedpo_tiny.yml.")
    max_train_samples: int | None = setting(None, "Prompts to make preference pairs of. Default: that of configs/relabel_tiny.yml.")
    max_eval_samples: int | None = setting(None, "Held-out prompts of the evaluation. Default: that of configs/generate_tiny.yml.")


def main() -> None:
    config = parse(DemoConfig)
    output = Path(config.output_dir).resolve()
    if output.is_relative_to(ROOT):
        output = output.relative_to(ROOT)
    os.chdir(ROOT)
    require(not output.exists(), f"output_dir {config.output_dir!r} holds an earlier demo: delete it, or name another")
    pairs, reward, policy, evaluation = (output / name for name in ("pairs", "reward_model", "online_dpo", "evaluation"))
    sft = output / "sft" if config.from_scratch else Path("checkpoints/sft_docstrings")

    def optional(**fields) -> list[str]:
        return [f"--{name}={value}" for name, value in fields.items() if value is not None]

    sampled = optional(max_eval_samples=config.max_eval_samples)
    stages = {
        "SFT": ["sft.py", "configs/sft_tiny.yml", f"--output_dir={sft}"],
        "preference pairs, labelled by the gold function": ["relabel_with_rm.py", "configs/relabel_tiny.yml", f"--model_name_or_path={sft}",
            f"--output_dir={pairs}", *optional(max_train_samples=config.max_train_samples)],
        "reward model": ["reward_modeling.py", "configs/rm_tiny.yml", f"--dataset_name={pairs}", f"--model_name_or_path={sft}",
            f"--output_dir={reward}"],
        "Online DPO": ["online_dpo.py", "configs/onlinedpo_tiny.yml", f"--model_name_or_path={sft}", f"--reward_model_path={reward}",
            f"--output_dir={policy}", f"--max_staleness={config.max_staleness}", f"--generator={config.generator}", f"--seed={config.seed}",
            *optional(total_episodes=config.total_episodes)],
        "completions of the SFT policy and of the trained ones": ["generate_for_eval.py", "configs/generate_tiny.yml",
            f"--model_name_or_path={policy}", *sampled],
        "gold evaluation": ["load_and_eval.py", "configs/evaluate_tiny.yml", f"--model_name_or_path={policy}",
            f"--output_dir={evaluation}"],
    }  # fmt: skip
    if not config.from_scratch:
        del stages["SFT"]
    seconds = run_stages(stages)

    results = json.loads((evaluation / "results.json").read_text())
    summary = summarize(results, seconds)
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print((evaluation / "results.md").read_text())
    print(f"{sum(seconds.values()):.0f} s. {output}/summary.json, {evaluation}/results.md, {evaluation}/gold_against_kl.png")


if __name__ == "__main__":
    run_script(main)
