"""A pipeline of the project's own scripts, each started as a user would start it."""

import shlex
import subprocess
import sys
import time


def run_stages(stages: dict[str, list[str]]) -> dict[str, float]:
    """Run `{title: [script, config, *fields]}` in order and return each one's seconds. A script's failure ends the process with its
    exit code. Commands are printed before they run."""
    seconds = {}
    for i, (title, (script, config, *fields)) in enumerate(stages.items(), 1):
        command = [sys.executable, script, "--config", config, *fields]
        print(f"\n[{i}/{len(stages)}] {title}\n$ python {shlex.join(command[1:])}", flush=True)
        started = time.perf_counter()
        code = subprocess.run(command).returncode
        if code:
            raise SystemExit(code)
        seconds[title] = time.perf_counter() - started
    return seconds


def summarize(results: dict, seconds: dict[str, float]) -> dict:
    """Of an evaluation's `results.json`: the baseline as `sft` and the last checkpoint as `rlhf`, their comparison, and seconds."""
    (sft,) = results["baseline"].values()
    rlhf = list(results["checkpoints"].values())[-1]
    names = ("win_rate", "win_rate_ci", "score", "score_ci", "kl", "perplexity", "response_length", "eos_rate")
    return {
        "sft": {name: sft[name] for name in names},
        "rlhf": {name: rlhf[name] for name in names},
        "authors": {"score": rlhf["reference_score"]},
        "head_to_head": rlhf["head_to_head"],
        "score_gain": rlhf["score_gain"],
        "seconds": {**seconds, "total": sum(seconds.values())},
    }
