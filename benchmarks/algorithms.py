"""Every algorithm on the docstrings, synchronous and one batch stale, three seeds: gold score against the SFT policy.

    python benchmarks/algorithms.py --reward_model_path results/rm_tiny                  # all of it: about 24 × 5 minutes on 2 cores
    python benchmarks/algorithms.py --algorithms ppo rloo --seeds 1 --staleness 0 1

Each run is the algorithm's tiny config, sampled by vLLM, and its evaluation. A run whose evaluation is there is not repeated, so a stopped
study goes on. Prints a table, the last checkpoint of every run in it; intervals are over prompts, the seeds' mean and range beside them.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from async_rlhf.config import parse, require, run_script, setting
from async_rlhf.stages import run_stages

SCRIPTS = {
    "onlinedpo": ("online_dpo.py", "configs/onlinedpo_tiny.yml"),
    "ppo": ("ppo.py", "configs/ppo_tiny.yml"),
    "rloo": ("rloo.py", "configs/rloo_tiny.yml"),
    "bo2": ("rloo.py", "configs/bo2_tiny.yml"),
}


@dataclass
class StudyConfig:
    algorithms: list[str] = setting(list(SCRIPTS), "Which ones.")
    staleness: list[int] = setting([0, 1], "Values of `max_staleness`.")
    seeds: list[int] = setting([1, 2, 3], "Seeds.")
    reward_model_path: str = setting("results/rm_tiny", "The reward model, the same for all.")
    generator: str = setting("vllm", "What samples in training: vllm or hf.")
    total_episodes: int | None = setting(None, "Completions a run. Default: the configs' own.")
    output_dir: str = setting("results/study", "Folder of all runs.")


def main() -> None:
    config = parse(StudyConfig)
    unknown = sorted(set(config.algorithms) - SCRIPTS.keys())
    require(not unknown, f"algorithms {', '.join(unknown)}: some of {', '.join(SCRIPTS)}")
    results = {}
    for seed in config.seeds:
        for name in config.algorithms:
            for stale in config.staleness:
                results[name, stale, seed] = study(config, name, stale, seed)
                print(table(results), flush=True)


def study(config: StudyConfig, name: str, stale: int, seed: int) -> dict:
    """The last checkpoint's results of one run, made now or read."""
    output = Path(config.output_dir) / f"{name}_s{stale}_seed{seed}"
    if not (output / "_evaluation" / "results.json").exists():
        script, file = SCRIPTS[name]
        fields = [f"--output_dir={output}", f"--max_staleness={stale}", f"--seed={seed}", f"--generator={config.generator}"]
        fields += [f"--reward_model_path={config.reward_model_path}", "--save_steps=1000", "--eval_steps=1000", "--overwrite_output_dir"]
        fields += [f"--total_episodes={config.total_episodes}"] if config.total_episodes else []
        run_stages(
            {
                f"{name}, staleness {stale}, seed {seed}": [script, file, *fields],
                "completions": ["generate_for_eval.py", "configs/generate_tiny.yml", f"--model_name_or_path={output}"],
                "gold evaluation": ["load_and_eval.py", "configs/evaluate_tiny.yml", f"--model_name_or_path={output}"],
            }
        )
    record = json.loads((output / "run_config.json").read_text())
    for field in ("reward_model_path", "generator", "total_episodes"):
        wanted = getattr(config, field)
        require(wanted in (None, record[field]), f"{field} {wanted}: the run in {output} has {record[field]}; name another output_dir")
    last = list(json.loads((output / "_evaluation" / "results.json").read_text())["checkpoints"].values())[-1]
    metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return last | {"seconds": float(np.median([record["time/update"] for record in metrics[1:]]))}


def table(results: dict) -> str:
    """A line an algorithm and staleness: the gain of each seed with its interval over prompts, and their mean."""
    lines = [
        "| algorithm | S | gold score | gain over SFT, by seed | mean gain | KL | tokens | s an update |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, stale in dict.fromkeys((name, stale) for name, stale, _ in results):
        runs = [run for (n, s, _), run in results.items() if (n, s) == (name, stale)]
        gains = ["{mean:.3f} [{ci[0]:.3f}, {ci[1]:.3f}]".format(**run["score_gain"]) for run in runs]
        mean = {key: np.mean([run[key] for run in runs]) for key in ("score", "kl", "response_length", "seconds")}
        gain = np.mean([run["score_gain"]["mean"] for run in runs])
        lines.append(
            f"| {name} | {stale} | {mean['score']:.3f} | {'; '.join(gains)} | {gain:.3f} | {mean['kl']:.2f} | "
            f"{mean['response_length']:.1f} | {mean['seconds']:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run_script(main)
