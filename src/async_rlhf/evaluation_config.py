"""Settings of the evaluation: of `generate_for_eval.py`, of `load_and_eval.py`, and what both take from the run and from each other.

The two scripts are one step to their user: they take the same flags and the same file, each reads the fields that are its own, and
what neither names comes from the run: its `generate_config` or `evaluate_config`, its data, its reference policy, its trackers.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, fields, make_dataclass
from pathlib import Path
from typing import Any, TypeVar

from async_rlhf.config import DataConfig, GeneratorConfig, ModelConfig, SamplingConfig, parse, require, setting
from async_rlhf.runs import run_settings

Config = TypeVar("Config")

GENERATIONS = "_generations"
SFT = "sft"
SETTINGS_FILE = "generations.json"
TRACKER_FIELDS = ("report_to", "project", "run_name", "wandb_run_id")


@dataclass
class EvalSamplingConfig(SamplingConfig):
    """How the completions that are judged are sampled. Recorded with them: `load_and_eval.py` takes these from the record."""

    temperature: float = setting(0.01, "Sampling temperature of the completions that are judged; the paper's is 0.01.")
    num_generations: int = setting(1, "Completions a prompt; scores and win rates are means over them.")
    kl_samples: int = setting(1, "Further samples a prompt, at `kl_temperature`, for the estimate of the KL; 0: none, and no KL.")
    kl_temperature: float | None = setting(None, "Temperature of the policies whose KL is estimated. Default: the run's own, else 1.")

    def __post_init__(self):
        super().__post_init__()
        require(self.num_generations >= 1, f"num_generations {self.num_generations}: at least 1")
        require(self.kl_samples >= 0, f"kl_samples {self.kl_samples}: 0 or more")
        require(self.kl_temperature is None or self.kl_temperature > 0, "kl_temperature 0: a greedy policy has no KL to estimate")


SAMPLING_FIELDS = [f.name for f in fields(EvalSamplingConfig)]


@dataclass
class GenerateConfig(EvalSamplingConfig, GeneratorConfig, DataConfig, ModelConfig):
    """Which run, which prompts, which engine, and how it samples."""

    model_name_or_path: str | None = setting(None, "The run: a folder of `checkpoint-<update>` models, or one model.")
    dataset_path: str | None = setting(None, "Folder for the generations. Default: `_generations` in the run's folder.")
    sample_sft: bool = setting(
        False, "Sample from the policy that the run started from too, as checkpoint `sft`: load_and_eval.py takes it as baseline."
    )
    seed: int = setting(1, "Seed of the sampling.")
    max_logprob_mismatch: float | None = setting(
        None, "Largest allowed difference between engine and checkpoint logprobs on a probe text. Default: 0.001 in float32, else 0.5."
    )
    dry_run: bool = setting(False, "Check paths and columns, print the plan, load no model.")

    def __post_init__(self):
        super().__post_init__()
        require(self.generator != "replay", "generator: replay has nothing to evaluate; choose vllm or hf")


@dataclass
class EvaluateConfig(EvalSamplingConfig, ModelConfig):
    """Which generations, judged by what, against what. `torch_dtype` is that of the SFT and of the gold model."""

    model_name_or_path: str | None = setting(None, "The run whose generations are judged.")
    dataset_path: str | None = setting(None, "Folder of the generations. Default: `_generations` in the run's folder.")
    baseline_dataset_path: str | None = setting(
        None, "Generations of another model, of the same prompts, to meet head to head. Default: those of `sft`, where it was sampled."
    )
    gold_reward_model_path: str | None = setting(
        None, "The judge: a model folder or hub name, or a Python function as `path/file.py:name` or `package.module:name`."
    )
    sft_model_path: str | None = setting(None, "What perplexity and KL refer to. Default: the run's own reference policy.")
    output_dir: str | None = setting(None, "Where the results are written. Default: `_evaluation` in the run's folder.")
    batch_size: int = setting(32, "Prompts that the SFT model, samples that the gold model takes at a time.")
    bootstrap_samples: int = setting(2000, "Times that the prompts are drawn anew for an interval.")
    seed: int = setting(1, "Seed of the intervals.")
    report_to: list[str] = setting(["none"], "Trackers that get `gold/*`. Default: those of the run, which is taken up again.")
    project: str = setting("async_rlhf", "Project in the trackers. Default: the run's.")
    run_name: str | None = setting(None, "Name of the run in the trackers. Default: the run's own.")
    wandb_run_id: str | None = setting(None, "Id of the run in the trackers. Default, or `slurm`: the training run's.")
    dry_run: bool = setting(False, "Check paths and settings, print the plan, load no model.")


# -- parsing ------------------------------------------------------------------------------------------------------------------


def parse_generate_config(argv: Sequence[str] | None = None) -> GenerateConfig:
    return _parse(GenerateConfig, EvaluateConfig, "generate_config", generate_defaults, argv)


def parse_evaluate_config(argv: Sequence[str] | None = None) -> EvaluateConfig:
    return _parse(EvaluateConfig, GenerateConfig, "evaluate_config", evaluate_defaults, argv)


def generate_defaults(config: GenerateConfig) -> dict:
    """Settings that generation takes from the run unless told otherwise: its data, response length and temperature."""
    trained = run_settings(config.model_name_or_path)
    own = {f.name for f in fields(DataConfig)} - {"max_train_samples", "max_eval_samples"}
    own |= {"response_length", "stop_token_ids", "tokenizer_name_or_path", "trust_remote_code"}
    return {"kl_temperature": trained.get("temperature", 1.0)} | {name: trained[name] for name in own & trained.keys()}


def evaluate_defaults(config: EvaluateConfig) -> dict:
    """Sampling settings and names from the generations' record, the rest from the run's own."""
    folder = generations_folder(config.dataset_path, config.model_name_or_path)
    if config.dry_run and not (folder / SETTINGS_FILE).exists():
        return {}
    settings = read_settings(folder)
    trained = run_settings(config.model_name_or_path or settings["model"])
    names = {"model_name_or_path": settings["model"], "tokenizer_name_or_path": settings["tokenizer"]}
    names |= {name: trained[name] for name in TRACKER_FIELDS if name in trained}
    names["sft_model_path"] = reference_policy(trained)
    return settings["sampling"] | names


def reference_policy(trained: dict) -> str | None:
    """The policy that a run's record names as its reference; SFT has none."""
    return None if trained.get("algorithm") == "SFT" else trained.get("sft_model_path") or trained.get("model_name_or_path")


def _parse(config_class: type[Config], companion: type, key: str, defaults: Callable[[Config], dict], argv: Sequence[str] | None) -> Config:
    """`parse` with the companion's fields accepted, over the file that the run names under `key`, over `defaults(config)`."""
    own = {f.name for f in fields(config_class)}
    theirs = [(f.name, f.type, _like(f, f"{companion.__name__}: ")) for f in fields(companion) if f.name not in own]
    both = make_dataclass(config_class.__name__, theirs, bases=(config_class,))
    run = parse(both, argv).model_name_or_path
    run_file = run_settings(run).get(key)
    here = run_file is None or Path(run_file).is_file()
    require(here, f"the run_config.json of {run!r} names {key} {run_file!r}, which is not here: start from the project's folder")
    values = defaults(parse(both, argv, beneath=run_file))
    given = [(f.name, f.type, setting(values[f.name], f.metadata["help"])) for f in fields(both) if f.name in values]
    return parse(make_dataclass(config_class.__name__, given, bases=(both,)), argv, beneath=run_file)


def _like(field: Field, prefix: str) -> Any:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return setting(default, prefix + field.metadata["help"])


# -- where the generations are --------------------------------------------------------------------------------------------------


def generations_folder(dataset_path: str | None, run: str | None) -> Path:
    """`dataset_path`, or `_generations` in the run's folder."""
    if dataset_path:
        return Path(dataset_path).expanduser()
    require(run, "neither dataset_path nor model_name_or_path is set")
    require(Path(run).expanduser().is_dir(), f"dataset_path is not set, and {run!r} is no folder that generations could be kept in")
    return Path(run).expanduser() / GENERATIONS


def read_settings(folder: Path) -> dict:
    """What the generations in the folder were made with."""
    path = folder / SETTINGS_FILE
    require(path.is_file(), f"dataset_path {str(folder)!r}: no {SETTINGS_FILE} there; generate_for_eval.py makes it")
    return json.loads(path.read_text(encoding="utf-8"))
