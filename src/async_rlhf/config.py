"""Configuration: dataclasses whose fields are the settings, read from a YAML file and then from the command line.

`parse(Config)` serves every script: `python script.py --config file.yml --field value --other=value`. A field's help string
is its documentation, and `--help` shows it.
"""

import argparse
import difflib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_type_hints

import yaml
from transformers import HfArgumentParser

Config = TypeVar("Config")


class UserError(ValueError):
    """Something that the user can change is wrong. Scripts print its message as one line and exit with 2."""


def setting(default: Any, help: str) -> Any:
    """A dataclass field with its help string."""
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


# -- settings shared by the scripts -------------------------------------------------------------------------------------


@dataclass
class DataConfig:
    """Where rows come from and how a row becomes a prompt and a completion."""

    dataset_name: str = setting(
        "docstrings",
        "A hub name, a folder saved by `datasets`, a .json/.jsonl/.csv/.parquet file, or `docstrings` (built in, no download).",
    )
    dataset_config: str | None = setting(None, "Configuration name of a hub data set.")
    train_split: str = setting("train", "Split to train on; slices such as `train[:1000]` work. A single file is the split `train`.")
    eval_split: str = setting("validation", "Held-out split, with the same syntax.")
    eval_dataset_name: str | None = setting(None, "Where the held-out split comes from when not from `dataset_name`.")
    max_train_samples: int | None = setting(None, "Use only the first so many training rows.")
    max_eval_samples: int | None = setting(None, "Use only the first so many held-out rows.")
    prompt_column: str = setting("prompt", "Column of the prompt: text, or a conversation for the chat template.")
    completion_column: str = setting("completion", "Column of the reference completion.")
    chosen_column: str = setting("chosen", "Column of the preferred completion.")
    rejected_column: str = setting("rejected", "Column of the other completion.")
    prompt_template: str | None = setting(
        None,
        'Builds the prompt from columns, e.g. "SUBREDDIT: r/{subreddit}\\n\\nPOST: {post}\\n\\nTL;DR:". Replaces `prompt_column`.',
    )
    completion_template: str | None = setting(None, "Builds the reference completion from columns, e.g. ' {summary}'.")
    system_prompt: str | None = setting(None, "System turn put before conversational prompts.")
    chat_template: bool = setting(False, "Give a text prompt to the tokenizer's chat template as one user turn.")
    max_prompt_length: int = setting(512, "Longest prompt, in tokens.")
    overlong_prompts: Literal["drop", "error"] = setting(
        "drop", "Prompts over `max_prompt_length`: drop them and print how many, or refuse to start."
    )


@dataclass
class ModelConfig:
    """Which policy, and in which form it is loaded."""

    model_name_or_path: str | None = setting(None, "The policy to start from: a folder or a hub name.")
    tokenizer_name_or_path: str | None = setting(None, "Its tokenizer, when not beside the model.")
    model_revision: str = setting("main", "Branch, tag or commit of a hub model.")
    torch_dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "float32",
        "Type in which models are loaded. Weights that train under `bf16` or `fp16` are float32 whatever this says. On a CPU keep "
        "float32: bfloat16 is about 50 times slower there.",
    )
    attn_implementation: str | None = setting(None, "Attention kernel of `transformers`: eager, sdpa, flash_attention_2.")
    trust_remote_code: bool = setting(False, "Run code that comes with a hub model.")
    use_peft: bool = setting(False, "Train a LoRA adapter. In RL the reference is then the model without it.")
    lora_r: int = setting(16, "Rank of the adapter.")
    lora_alpha: int = setting(32, "Scale of the adapter.")
    lora_dropout: float = setting(0.0, "Dropout of the adapter.")
    lora_target_modules: list[str] | None = setting(None, "Modules that get an adapter; by default `peft` chooses.")


@dataclass
class SamplingConfig:
    """How completions are sampled: the same few settings in training, relabelling and evaluation."""

    response_length: int = setting(53, "Most tokens of a response.")
    temperature: float = setting(0.7, "Sampling temperature. 0 takes the most likely token.")
    top_p: float = setting(1.0, "Nucleus sampling. It changes the distribution, so ratios no longer describe what was sampled.")
    top_k: int = setting(0, "Sample among the k most likely tokens; 0 is off. Changes the distribution like `top_p`.")
    stop_token_ids: list[int] | None = setting(None, "Further ids that end a response, besides the tokenizer's and the model's own.")

    def __post_init__(self):
        require(self.response_length >= 1, f"response_length {self.response_length}: at least 1 token")
        require(self.temperature >= 0, f"temperature {self.temperature}: 0 or more")
        require(0 < self.top_p <= 1, f"top_p {self.top_p}: above 0, at most 1")


@dataclass
class GeneratorConfig(SamplingConfig):
    """Which engine samples, and where it runs."""

    generator: Literal["vllm", "hf", "replay"] = setting(
        "vllm",
        "vllm: an engine in its own process; hf: `transformers` in this one; replay: the rollouts of `replay_path`, no engine.",
    )
    replay_path: str | None = setting(None, "A rollouts.jsonl written by `dump_rollouts`, for `generator: replay`.")
    hf_generation_batch_size: int = setting(128, "Completions sampled at a time by `generator: hf`.")
    vllm_device: str | None = setting(
        None,
        "Where the engine runs: cuda:3, or cpu:1 for that core alone. Default: the device after the last training process's, "
        "else the training GPU itself, shared; on a CPU the last core, the trainer keeping the others.",
    )
    vllm_gpu_memory_utilization: float = setting(0.9, "Share of its GPU's memory that the engine may take. About 0.2 on a shared GPU.")
    vllm_cpu_kvcache_gib: int = setting(1, "GiB of memory for the KV cache of a CPU engine.")
    vllm_dtype: str = setting("auto", "Type of the engine's weights; auto is the type that training publishes.")
    vllm_enforce_eager: bool | None = setting(None, "Switch CUDA graphs off. Default: off on a CPU only.")
    generator_timeout: float = setting(1800.0, "Seconds to wait for the generator before the run ends with an error.")
    engine_timeout: float = setting(600.0, "Seconds without an answer after which a vLLM engine counts as stuck.")
    max_engine_restarts: int = setting(
        3, "Times that an engine which died or got stuck is started again, in all, before its error ends the run."
    )

    def __post_init__(self):
        super().__post_init__()
        require(self.generator != "replay" or self.replay_path, "generator: replay needs replay_path, a rollouts.jsonl")
        for name in ("generator_timeout", "engine_timeout"):
            require(getattr(self, name) > 0, f"{name} {getattr(self, name)}: above 0 seconds")
        require(self.max_engine_restarts >= 0, f"max_engine_restarts {self.max_engine_restarts}: 0 or more")


@dataclass
class RunConfig:
    """Where the results of a training run go, who is told of them, and how they are evaluated afterwards."""

    output_dir: str = setting("results/run", "Folder of the run: checkpoints, metrics.jsonl, completions.")
    output_global_parent_dir: str | None = setting(None, "Folder that a relative `output_dir` is put under.")
    run_name: str | None = setting(None, "Name of the run in the trackers. Default: the folder's name.")
    project: str = setting("async_rlhf", "Project of the run in the trackers.")
    report_to: list[str] = setting(["none"], "Trackers: wandb, tensorboard, trackio, or none.")
    wandb_run_id: str | None = setting(
        None,
        "Id of the run in wandb, and its name in Trackio. Default: a new one. slurm: `<parent>_<job id>_<output_dir>`, and the output "
        "goes to `<parent>/<job id>/<output_dir>`; the parent is `output_global_parent_dir`, else the folder that holds `output_dir`.",
    )
    push_to_hub: bool = setting(False, "Push the final model with its model card to the hub, as `hub_model_id`.")
    hub_model_id: str | None = setting(None, "Hub name of the pushed model. Default: the folder's name, under the token's user.")
    generate_config: str | None = setting(None, "YAML with which generate_for_eval.py samples from this run, unless told otherwise.")
    evaluate_config: str | None = setting(None, "YAML with which load_and_eval.py judges this run, unless told otherwise.")

    def __post_init__(self):
        known = {"wandb", "tensorboard", "trackio", "none"}
        for tracker in [self.report_to] if isinstance(self.report_to, str) else self.report_to:
            require(tracker in known, f"report_to {tracker!r}: one of {', '.join(sorted(known))}")
        absolute = self.output_global_parent_dir and Path(self.output_dir).is_absolute()
        require(not absolute, f"output_dir {self.output_dir!r} is absolute: leave output_global_parent_dir out")
        super_post_init = getattr(super(), "__post_init__", None)
        if super_post_init:
            super_post_init()


@dataclass
class RLConfig(RunConfig, DataConfig, ModelConfig, GeneratorConfig):
    """Settings of the loop, the same for every algorithm."""

    overwrite_output_dir: bool = setting(False, "Delete what an earlier run left in `output_dir`; otherwise that is an error.")
    seed: int = setting(1, "Seed of everything random: prompt order, sampling, mini-batches.")
    sft_model_path: str | None = setting(None, "The reference policy. Default: `model_name_or_path`.")
    reference_url: list[str] = setting(
        [], "Servers of the reference policy, asked instead of loading it here; `sft_model_path` then names it for the evaluation alone."
    )
    reference_server: Literal["serve_reward_model", "vllm"] = setting(
        "serve_reward_model",
        "What answers there: serve_reward_model.py with a `reference_model_path`, or vLLM's own server, for `temperature: 1` alone; "
        "its URL ends in /v1.",
    )
    reference_request: dict = setting(
        {}, "How the servers are asked: batch_size, timeout, retries, ... ([rewards.md](rewards.md)), as a mapping."
    )
    reward: list[str] = setting(
        [],
        "The rewards, whose weighted sum is the score. Each is a model folder or hub name, a Python function as `path/file.py:name` or "
        "`package.module:name`, a URL, or a mapping of settings ([rewards.md](rewards.md)).",
    )
    reward_model_path: str | None = setting(None, "The only reward: short for `reward` with one entry.")
    score_in_pipeline: bool = setting(
        False,
        "Score batches while they wait for the trainer, all on the main process: it hides the time of rewards over a network. Not for a "
        "sharded reward model.",
    )
    reward_batch_size: int = setting(64, "Samples that a reward model scores at a time.")
    missing_eos_penalty: float | None = setting(None, "Subtracted from the score of a response that did not end by itself.")
    missing_eos_score: float | None = setting(None, "Replaces the score of a response that did not end by itself (the paper's -1).")

    max_staleness: int = setting(
        1, "Batches that generation may run ahead: 0 is synchronous and on-policy, 1 the paper's asynchronous run."
    )
    weight_update: Literal["exact", "newest"] = setting(
        "exact", "Which snapshot samples batch b. exact: b - max_staleness, always; newest: the newest there is, so timing decides."
    )
    num_mini_batches: int = setting(1, "Optimizer steps an epoch over a batch: the batch is that many times larger.")
    num_ppo_epochs: int = setting(1, "Epochs over each batch.")
    num_generations: int = setting(2, "Completions sampled a prompt, k.")
    total_episodes: int = setting(10_000, "Completions to train on in all; rounded up to whole batches.")
    per_device_train_batch_size: int = setting(16, "Completions a process holds in one forward; a multiple of `num_generations`.")
    gradient_accumulation_steps: int = setting(
        1, "Times that many completions an optimizer step; forwards are cut by length, so there may be fewer or more."
    )

    learning_rate: float = setting(3e-6, "Peak learning rate of AdamW.")
    lr_scheduler_type: str = setting("linear", "Schedule over the optimizer steps: linear, cosine, constant, constant_with_warmup, ...")
    warmup_steps: int = setting(0, "Optimizer steps of linear warm-up.")
    weight_decay: float = setting(0.0, "AdamW's weight decay.")
    adam_beta1: float = setting(0.9, "AdamW's first beta.")
    adam_beta2: float = setting(0.999, "AdamW's second beta.")
    adam_epsilon: float = setting(1e-8, "AdamW's epsilon.")
    max_grad_norm: float = setting(1.0, "Gradients are clipped to this norm.")
    bf16: bool = setting(False, "Mixed precision with bfloat16.")
    fp16: bool = setting(False, "Mixed precision with float16 and a gradient scaler.")
    gradient_checkpointing: bool = setting(False, "Recompute activations in the backward pass; prompts are then not shared.")
    share_prompts: bool = setting(True, "Run each prompt once for its k responses.")

    max_logprob_mismatch: float | None = setting(
        None, "Largest allowed difference between generator and trainer logprobs on a probe text. Default: 0.001 in float32, else 0.5."
    )
    wait_report: float = setting(60.0, "Say what the generator is doing whenever the trainer has waited so many seconds for it.")
    snapshot_dir: str | None = setting(None, "Folder for weight snapshots on their way to the generator. Default: shared memory.")
    save_steps: float = setting(
        0.25, "Save a checkpoint every so many updates; below 1 a share of the run. The last update is always saved."
    )
    save_total_limit: int | None = setting(
        None, "Checkpoints to keep; older ones are deleted. Default: all. The newest two can be resumed, all of them evaluated."
    )
    resume_from_checkpoint: str | None = setting(
        None,
        "A checkpoint in `output_dir` to go on from, exactly; or `latest`: the newest whole one, or the start where there is none.",
    )
    eval_steps: int | None = setting(None, "Sample and score held-out prompts every so many updates, and at the end. Default: never.")
    num_eval_prompts: int = setting(64, "Held-out prompts that an evaluation samples.")
    dump_rollouts: bool = setting(False, "Append every rollout to `output_dir`/rollouts.jsonl, for study or `generator: replay`.")
    dry_run: bool = setting(False, "Check paths and columns, print batch arithmetic, devices and files, load no model.")

    def __post_init__(self):
        super().__post_init__()
        require(self.max_staleness >= 0, f"max_staleness {self.max_staleness}: 0 or more")
        for name in ("num_mini_batches", "num_ppo_epochs", "total_episodes", "gradient_accumulation_steps"):
            require(getattr(self, name) >= 1, f"{name} {getattr(self, name)}: at least 1")
        size, k = self.per_device_train_batch_size, self.num_generations
        require(k >= 1 and size >= 1 and size % k == 0, f"per_device_train_batch_size {size} is no multiple of num_generations {k}")
        require(self.temperature > 0, "temperature 0: training samples need a temperature above 0")
        require(not (self.bf16 and self.fp16), "bf16 and fp16 exclude each other")
        unscaled = self.torch_dtype == "float16" and not self.fp16
        require(not unscaled, "torch_dtype float16 trains with a gradient scaler only: add fp16, or use bfloat16 or float32")
        require(self.wait_report > 0, f"wait_report {self.wait_report}: above 0 seconds")
        require(self.save_steps > 0, f"save_steps {self.save_steps}: above 0")
        limit = self.save_total_limit
        require(limit is None or limit >= 1, f"save_total_limit {limit}: at least 1, or null for all")
        other = self.use_peft and self.sft_model_path not in (None, self.model_name_or_path)
        require(not other, f"sft_model_path {self.sft_model_path!r}: with use_peft the reference is model_name_or_path without the adapter")
        require(
            not (self.use_peft and self.reference_url),
            "reference_url: with use_peft the reference is model_name_or_path without the adapter, which is here already: leave it out",
        )
        at_one = not self.reference_url or self.reference_server != "vllm" or self.temperature == 1
        require(
            at_one,
            f"reference_server vllm: its log-probabilities are those of temperature 1, and temperature is {self.temperature}: set it to 1, "
            "or serve the reference by serve_reward_model.py",
        )
        require(not (self.reward and self.reward_model_path), "reward and reward_model_path exclude each other")
        eos = self.missing_eos_penalty, self.missing_eos_score
        require(None in eos, "missing_eos_penalty and missing_eos_score exclude each other")

    @property
    def rewards(self) -> list[str]:
        """What `reward` or `reward_model_path` names."""
        return self.reward or [self.reward_model_path]


@dataclass(frozen=True)
class BatchPlan:
    """The arithmetic of a run on `processes` training processes. Counts are completions unless the name says otherwise."""

    processes: int
    completions: int
    prompts: int
    updates: int
    optimizer_steps: int
    prompts_per_mini_batch: int
    prompts_per_forward: int

    @classmethod
    def of(cls, config: RLConfig, processes: int) -> "BatchPlan":
        k = config.num_generations
        step = config.per_device_train_batch_size * config.gradient_accumulation_steps * processes
        completions = step * config.num_mini_batches
        updates = -(-config.total_episodes // completions)
        return cls(
            processes=processes,
            completions=completions,
            prompts=completions // k,
            updates=updates,
            optimizer_steps=updates * config.num_mini_batches * config.num_ppo_epochs,
            prompts_per_mini_batch=step // k,
            prompts_per_forward=config.per_device_train_batch_size // k,
        )

    def saves(self, save_steps: float) -> list[int]:
        """The updates after which a checkpoint is saved; the last one always is."""
        every = max(1, round(save_steps * self.updates if save_steps < 1 else save_steps))
        return sorted({*range(every, self.updates + 1, every), self.updates})

    def describe(self, config: RLConfig) -> str:
        newest = config.max_staleness * config.num_mini_batches * config.num_ppo_epochs
        oldest = newest + config.num_mini_batches * config.num_ppo_epochs - 1
        return (
            f"batch: {self.prompts} prompts × {config.num_generations} = {self.completions} completions "
            f"({config.per_device_train_batch_size} a forward × {config.gradient_accumulation_steps} accumulated "
            f"× {self.processes} processes × {config.num_mini_batches} mini-batches)\n"
            f"run: {self.updates} updates, {self.updates * self.completions} episodes, {self.optimizer_steps} optimizer steps\n"
            f"staleness: {config.max_staleness} batches ({config.weight_update}), so {newest} to {oldest} optimizer steps"
        )


def require(condition: Any, message: str) -> None:
    """Raise `UserError(message)` unless the condition holds."""
    if not condition:
        raise UserError(message)


# -- parsing --------------------------------------------------------------------------------------------------------------


class _Parser(HfArgumentParser):
    """Errors are one line that names the field."""

    def error(self, message: str):
        raise UserError(message.removeprefix("argument "))


def parse(config_class: type[Config], argv: Sequence[str] | None = None, beneath: str | None = None) -> Config:
    """An instance of the config class, from the `--config` file and then the command line. The file `beneath` speaks where neither
    does.

    Raises:
        UserError: unknown key (with the nearest field named), wrong type, or a value that the config refuses.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    known, argv = first.parse_known_args(argv)
    return _read(config_class, {path: _read_yaml(path) for path in filter(None, (beneath, known.config))}, argv)


def from_mapping(config_class: type[Config], values: Mapping[str, Any], where: str) -> Config:
    """An instance of the config class from a mapping that stands at `where`, a setting or a file.

    Raises:
        UserError: as `parse`, after the name of the place.
    """
    try:
        return _read(config_class, {where: values}, [])
    except UserError as error:
        message = str(error)
        raise UserError(message if message.startswith(where) else f"{where}: {message}") from error


def _read(config_class: type[Config], sources: Mapping[str, Mapping[str, Any]], argv: Sequence[str]) -> Config:
    """From mappings by their names, later ones first, and the words of a command line, which win."""
    parser = _Parser(config_class, allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--config", help="A YAML file of fields; the command line wins over it.")
    for action in parser._actions:
        if action.type is dict:
            action.type = _json_mapping
    names = sorted({action.dest for action in parser._actions} - {"help"})
    values = {}
    for where, mapping in sources.items():
        for key, value in mapping.items():
            require(key in names, f"{where}: {_unknown(key, names)}")
            values[key] = value
    hints = get_type_hints(config_class)
    for key, value in values.items():  # what no argument can say
        if value is None or value == []:
            optional = value is not None or type(None) in get_args(hints.get(key))
            require(optional, f"{key}: null is no value of it; leave it out for the default")
            parser.set_defaults(**{key: value})
    from_file = [word for key, value in values.items() if value is not None and value != [] for word in _as_arguments(key, value)]
    config, *_, rest = _build(parser, [*from_file, *argv])
    for word in rest:
        name = word.split("=")[0].removeprefix("--")
        require(not word.startswith("--"), _unknown(name, names))
        raise UserError(f"{word!r} stands alone on the command line; fields are given as --field value")
    return config


def _build(parser: _Parser, arguments: list[str]) -> tuple:
    try:
        return parser.parse_args_into_dataclasses(arguments, return_remaining_strings=True, look_for_args_file=False)
    except UserError:
        raise
    except (ValueError, TypeError, ImportError) as error:  # a config class of a library refuses its values
        raise UserError(" ".join(str(error).split())) from error


def _json_mapping(text: str) -> dict:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("a mapping is needed")
    return value


def _read_yaml(path: str) -> dict:
    require(Path(path).is_file(), f"--config {path}: no such file")
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise UserError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from error
    require(isinstance(values, dict), f"--config {path}: a YAML mapping of fields is needed, not a {type(values).__name__}")
    return values


def _as_arguments(key: str, value: Any) -> list[str]:
    def word(value: Any) -> str:
        return json.dumps(value) if isinstance(value, dict) else str(value)

    return [f"--{key}", *map(word, value)] if isinstance(value, list) else [f"--{key}={word(value)}"]


def _unknown(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"unknown field {name!r}" + (f"; did you mean {near[0]!r}?" if near else "; --help lists the fields")


def run_script(main: Callable[[], Any]) -> None:
    """Run a script's main; a `UserError` becomes one line on stderr and exit code 2."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
