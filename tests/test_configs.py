"""Every file of configs/: it parses, its batch arithmetic is the paper's, and its script takes it for a dry run. No hub is asked."""

import functools
import json
import os
import re
import sys
from dataclasses import fields

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from conftest import ROOT
from datasets import Dataset, DatasetDict

import generate_for_eval
import load_and_eval
import online_dpo
import ppo
import relabel_with_rm
import reward_modeling
import rloo
import sft
from async_rlhf.config import BatchPlan, DataConfig, parse
from async_rlhf.data import Encoder, is_local
from generate_for_eval import GenerateConfig
from load_and_eval import EvaluateConfig

CONFIGS = ROOT / "configs"
SCRIPTS = {
    "onlinedpo": (online_dpo, online_dpo.OnlineDPOConfig),
    "ppo": (ppo, ppo.PPOConfig),
    "rloo": (rloo, rloo.RLOOConfig),
    "bo2": (rloo, rloo.RLOOConfig),
    "sft": (sft, sft.SFTScriptConfig),
    "rm": (reward_modeling, reward_modeling.RewardModelingConfig),
    "relabel": (relabel_with_rm, relabel_with_rm.RelabelConfig),
    "generate": (generate_for_eval, GenerateConfig),
    "evaluate": (load_and_eval, EvaluateConfig),
}
LOOP = ("onlinedpo", "ppo", "rloo", "bo2")  # the scripts that run the loop
FILES = sorted(path.name for path in CONFIGS.glob("*.yml"))
LAUNCH_FILES = sorted(path.name for path in CONFIGS.glob("*.yaml"))


@functools.cache
def read(name: str):
    return parse(SCRIPTS[name.split("_")[0]][1], ["--config", str(CONFIGS / f"{name}.yml")])


# -- the paper's tables, typed from them -----------------------------------------------------------------------------------------

HF, SHARED, ASYNC = ("hf", 0), ("vllm", 0), ("vllm", 1)  # generator and max_staleness
ONLINE_DPO = [
    # file, training processes, engine
    # prompts a forward, accumulated, prompts a batch, the paper's batches, ours: we keep its episodes and make whole batches of them
    # k, lr, beta, temperature, response length, missing eos
    ("pythia410m_tldr", 1, HF, (8, 16, 128, 1024, 1024), (2, 3e-6, 0.1, 0.7, 53, -1)),
    ("pythia1b_tldr", 1, HF, (8, 16, 128, 1024, 1024), (2, 3e-6, 0.1, 0.7, 53, -1)),
    ("pythia2.8b_tldr", 1, HF, (2, 64, 128, 1024, 1024), (2, 3e-6, 0.1, 0.7, 53, -1)),
    ("pythia410m_tldr_bf16_4gpu", 4, HF, (32, 4, 512, 256, 256), (2, 3e-6, 0.1, 0.7, 53, -1)),
    ("pythia1b_tldr_bf16_4gpu", 4, HF, (16, 8, 512, 256, 256), (2, 3e-6, 0.1, 0.7, 53, -1)),
    ("pythia2.8b_tldr_bf16_4gpu", 4, HF, (4, 32, 512, 256, 256), (2, 3e-6, 0.1, 0.7, 53, -1)),
    ("pythia410m_tldr_vllm_bf16_4gpu", 3, ASYNC, (21, 8, 504, 256, 256), (2, 3e-6, 0.1, 0.7, 53, -1)),
    ("pythia1b_tldr_vllm_bf16_4gpu", 3, ASYNC, (8, 21, 504, 256, 256), (2, 3e-6, 0.1, 0.7, 53, -1)),
    ("pythia2.8b_tldr_vllm_bf16_4gpu", 3, ASYNC, (6, 28, 504, 256, 256), (2, 3e-6, 0.1, 0.7, 53, -1)),
    ("pythia410m_tldr_vllm_bf16_1gpu", 1, SHARED, (8, 64, 512, 256, 256), (2, 3e-6, 0.1, 0.7, 53, -1)),
    ("pythia1b_tldr_vllm_bf16_1gpu", 1, SHARED, (4, 128, 512, 256, 256), (2, 3e-6, 0.1, 0.7, 53, -1)),
    ("pythia2.8b_tldr_vllm_bf16_1gpu", 1, SHARED, (2, 256, 512, 256, 256), (2, 3e-6, 0.1, 0.7, 53, -1)),  # the split is ours
    ("llama8b_chat_vllm_bf16_8gpu", 7, ASYNC, (1, 37, 259, 391, 387), (2, 8e-7, 0.03, 0.7, 1024, -10)),  # the paper's: 256 prompts
    ("rho1b_gsm8k_vllm_bf16_4gpu", 3, ASYNC, (6, 14, 252, 512, 512), (4, 3e-6, 0.1, 0.7, 512, None)),
    ("rho1b_gsm8k", 1, HF, (4, 64, 256, 512, 512), (4, 3e-6, 0.1, 0.7, 512, None)),  # ours
]
POLICY_GRADIENT = [
    # file, training processes, engine, mixed precision
    # completions a forward, accumulated, prompts a batch, completions a batch, batches; k
    # the paper's at 410M on one GPU, where PPO and RLOO count completions, best-of-2 prompts; the others are extrapolated
    ("ppo_pythia410m_tldr", 1, HF, "fp16", (8, 16, 128, 128, 1024), 1),
    ("ppo_pythia1b_tldr", 1, HF, "fp16", (8, 16, 128, 128, 1024), 1),
    ("ppo_pythia2.8b_tldr", 1, HF, "fp16", (2, 64, 128, 128, 1024), 1),
    ("rloo_pythia410m_tldr", 1, HF, "fp16", (16, 8, 64, 128, 1024), 2),
    ("rloo_pythia1b_tldr", 1, HF, "fp16", (16, 8, 64, 128, 1024), 2),
    ("rloo_pythia2.8b_tldr", 1, HF, "fp16", (4, 32, 64, 128, 1024), 2),
    ("bo2_pythia410m_tldr", 1, HF, None, (32, 8, 128, 256, 1024), 2),
    ("bo2_pythia1b_tldr", 1, HF, None, (32, 8, 128, 256, 1024), 2),
    ("bo2_pythia2.8b_tldr", 1, HF, None, (8, 32, 128, 256, 1024), 2),
    ("ppo_pythia410m_tldr_vllm_bf16_4gpu", 3, ASYNC, "bf16", (21, 8, 504, 504, 256), 1),
    ("ppo_pythia1b_tldr_vllm_bf16_4gpu", 3, ASYNC, "bf16", (8, 21, 504, 504, 256), 1),
    ("ppo_pythia2.8b_tldr_vllm_bf16_4gpu", 3, ASYNC, "bf16", (6, 28, 504, 504, 256), 1),
    ("rloo_pythia410m_tldr_vllm_bf16_4gpu", 3, ASYNC, "bf16", (42, 4, 252, 504, 256), 2),
    ("rloo_pythia1b_tldr_vllm_bf16_4gpu", 3, ASYNC, "bf16", (14, 12, 252, 504, 256), 2),
    ("rloo_pythia2.8b_tldr_vllm_bf16_4gpu", 3, ASYNC, "bf16", (12, 14, 252, 504, 256), 2),
    ("bo2_pythia410m_tldr_vllm_bf16_4gpu", 3, ASYNC, "bf16", (42, 8, 504, 1008, 256), 2),
    ("bo2_pythia1b_tldr_vllm_bf16_4gpu", 3, ASYNC, "bf16", (16, 21, 504, 1008, 256), 2),
    ("bo2_pythia2.8b_tldr_vllm_bf16_4gpu", 3, ASYNC, "bf16", (12, 28, 504, 1008, 256), 2),
    ("ppo_rho1b_gsm8k_vllm_bf16_4gpu", 3, ASYNC, "bf16", (12, 7, 63, 252, 2048), 4),
    ("rloo_rho1b_gsm8k_vllm_bf16_4gpu", 3, ASYNC, "bf16", (12, 7, 63, 252, 2048), 4),
    ("bo2_rho1b_gsm8k_vllm_bf16_4gpu", 3, ASYNC, "bf16", (24, 14, 252, 1008, 512), 4),
]
SUPERVISED = [
    # file, processes; rows a forward, accumulated, rows a batch; lr, schedule, epochs, longest, mixed precision
    ("sft_pythia410m_tldr", 1, (8, 4, 32), (1e-5, "cosine", 1, 580, "bf16")),  # the split is ours
    ("sft_pythia1b_tldr", 1, (8, 4, 32), (1e-5, "cosine", 1, 580, "bf16")),
    ("sft_pythia2.8b_tldr", 1, (4, 8, 32), (1e-5, "cosine", 1, 580, "bf16")),
    ("rm_pythia410m_tldr", 1, (8, 8, 64), (1e-5, "cosine", 1, 640, None)),
    ("rm_pythia1b_tldr", 1, (4, 4, 16), (1e-5, "cosine", 1, 640, "fp16")),
    ("rm_pythia2.8b_tldr", 1, (2, 8, 16), (1e-5, "cosine", 1, 640, "fp16")),
    ("sft_llama8b_chat", 8, (1, 16, 128), (5e-6, "linear", 2, 2048, "bf16")),
    ("rm_llama8b_chat", 8, (1, 32, 256), (3e-6, "linear", 1, 1536, "bf16")),
]


@pytest.mark.parametrize(("name", "processes", "engine", "batch", "values"), ONLINE_DPO, ids=[row[0] for row in ONLINE_DPO])
def test_online_dpo_is_the_papers(name, processes, engine, batch, values):
    config = read(f"onlinedpo_{name}")
    plan = BatchPlan.of(config, processes)
    forward, accumulated, prompts, papers_batches, batches = batch
    assert (plan.prompts_per_forward, config.gradient_accumulation_steps, plan.prompts) == (forward, accumulated, prompts)
    assert plan.updates == plan.optimizer_steps == batches
    assert batches == pytest.approx(papers_batches, rel=0.02)  # 504 prompts do not divide 131,072, nor 259 100,000
    score = config.missing_eos_score
    read_values = config.num_generations, config.learning_rate, config.beta, config.temperature, config.response_length, score
    assert read_values == values
    assert (config.generator, config.max_staleness) == engine
    assert (config.lr_scheduler_type, config.save_steps) == ("linear", 0.25)
    assert config.bf16 is (name not in {"pythia410m_tldr", "pythia1b_tldr", "pythia2.8b_tldr"})
    assert (config.torch_dtype == "bfloat16") is (config.bf16 and name.startswith(("pythia2.8b", "llama8b")))
    assert config.vllm_gpu_memory_utilization == (0.2 if engine == SHARED else 0.9)


def precision(config) -> str | None:
    return "bf16" if config.bf16 else "fp16" if config.fp16 else None


@pytest.mark.parametrize(("name", "processes", "engine", "mixed", "batch", "k"), POLICY_GRADIENT, ids=[row[0] for row in POLICY_GRADIENT])
def test_ppo_rloo_and_best_of_n_are_the_papers(name, processes, engine, mixed, batch, k):
    config = read(name)
    plan = BatchPlan.of(config, processes)
    forward, accumulated, prompts, completions, batches = batch
    assert (config.per_device_train_batch_size, config.gradient_accumulation_steps) == (forward, accumulated)
    assert (config.num_generations, plan.prompts, plan.completions) == (k, prompts, completions)
    assert plan.updates == plan.optimizer_steps == batches
    assert config.total_episodes == completions * batches  # no batch is rounded up
    assert (config.generator, config.max_staleness, precision(config)) == (*engine, mixed)
    tldr = "gsm8k" not in name
    assert (config.learning_rate, config.kl_coef, config.temperature) == (3e-6, 0.05, 0.7)
    assert (config.response_length, config.missing_eos_score) == ((53, -1) if tldr else (512, None))
    assert (config.lr_scheduler_type, config.save_steps) == ("linear", 0.25)
    half = {"fp16": "float16", "bf16": "bfloat16", None: "float32"}[mixed]
    assert config.torch_dtype == (half if "2.8b" in name else "float32")


@pytest.mark.parametrize("name", [row[0] for row in POLICY_GRADIENT])
def test_losses_of_ppo_rloo_and_best_of_n_are_the_papers(name):
    config = read(name)
    if not name.startswith("bo2"):
        ratio = config.old_logprobs, config.clip_range, config.clip_range_high, config.correction
        assert ratio == ("engine", 0.2, None, "none")
    if name.startswith("ppo"):
        assert (config.loss_type, config.gamma, config.lam, config.vf_coef, config.value_clip_range) == ("clip", 1.0, 0.95, 0.1, 0.2)
        assert (config.whiten_advantages, config.whiten_rewards, config.score_at) == (True, False, "next_token")
        assert (config.value_model_path, config.value_warmup_updates) == (None, 0)
    elif name.startswith("rloo"):
        assert (config.loss_type, config.ratio_level, config.kl_in) == ("proximal", "sequence", "sampled_reward")
    else:
        assert config.loss_type == "best_of_n"


def test_what_is_extrapolated_says_so():
    for name, *_ in POLICY_GRADIENT:
        papers = name in {"ppo_pythia410m_tldr", "rloo_pythia410m_tldr", "bo2_pythia410m_tldr"}
        comment = (CONFIGS / f"{name}.yml").read_text(encoding="utf-8").split("dataset_name")[0]
        assert ("extrapolated" in comment, "The paper's values" in comment) == (not papers, papers), name


@pytest.mark.parametrize(("name", "processes", "batch", "values"), SUPERVISED, ids=[row[0] for row in SUPERVISED])
def test_sft_and_reward_models_are_the_papers(name, processes, batch, values):
    config = read(name)
    forward, accumulated, rows = batch
    assert (config.per_device_train_batch_size, config.gradient_accumulation_steps) == (forward, accumulated)
    assert forward * accumulated * processes == rows
    schedule = config.lr_scheduler_type.value
    assert (config.learning_rate, schedule, config.num_train_epochs, config.max_length, precision(config)) == values


@pytest.mark.parametrize("size", ["410m", "1b", "2.8b"])
def test_tldr_stages_hand_on_to_each_other(size):
    policy, reward = f"mnoukhov/pythia{size}-sft-tldr", f"mnoukhov/pythia{size}-rm-tldr6.9b"
    ends = {"onlinedpo": ("", "_bf16_4gpu", "_vllm_bf16_4gpu", "_vllm_bf16_1gpu")}
    names = [f"{kind}_pythia{size}_tldr{end}" for kind in LOOP for end in ends.get(kind, ("", "_vllm_bf16_4gpu"))]
    for config in map(read, names):
        assert (config.model_name_or_path, config.sft_model_path, config.reward_model_path) == (policy, policy, reward)
        assert (config.dataset_name, config.prompt_column) == (read("generate_tldr").dataset_name, "query")
    assert read(f"rm_pythia{size}_tldr").model_name_or_path == policy
    assert read(f"rm_pythia{size}_tldr").dataset_name == read("relabel_rm").output_dir
    assert read(f"sft_pythia{size}_tldr").model_name_or_path == f"EleutherAI/pythia-{size}-deduped"
    assert read(f"sft_pythia{size}_tldr").completion_only_loss is False
    assert read("relabel_rm").reward_model_path == read("evaluate_tldr").gold_reward_model_path


def test_gsm8k_runs_share_data_models_and_episodes():
    shared = [field.name for field in fields(DataConfig)]
    shared += ["model_name_or_path", "sft_model_path", "reward_model_path", "generate_config", "evaluate_config", "response_length"]
    runs = [read(f"{kind}_rho1b_gsm8k_vllm_bf16_4gpu") for kind in LOOP]
    for name in [*shared, "num_generations", "total_episodes", "learning_rate"]:
        assert len({str(getattr(config, name)) for config in runs}) == 1, name


def test_chat_stages_hand_on_to_each_other():
    policy, reward, rl = read("sft_llama8b_chat"), read("rm_llama8b_chat"), read("onlinedpo_llama8b_chat_vllm_bf16_8gpu")
    folders = [f"{config.output_global_parent_dir}/{config.output_dir}" for config in (policy, reward)]
    assert [rl.sft_model_path, rl.reward_model_path] == folders
    assert (rl.model_name_or_path, reward.model_name_or_path) == (folders[0], folders[0])
    assert (read("evaluate_chat").sft_model_path, read("evaluate_chat").gold_reward_model_path) == tuple(folders)
    assert policy.warmup_steps == 0.03


def test_a_reference_that_brings_its_own_end_gets_no_second(tokenizer):
    """query and reference_response, which ends with the end of sequence, make the tokens of the paper's query_reference_response."""
    config = read("sft_pythia410m_tldr")
    row = {"query": "The cat sees the dog near a", "reference_response": f" fish.{tokenizer.eos_token}"}
    encoder = Encoder(config, tokenizer)
    ids = encoder.prompt_ids(row) + encoder.completion_ids(row)
    assert ids == tokenizer(row["query"] + row["reference_response"])["input_ids"]
    assert ids.count(tokenizer.eos_token_id) == 1


# -- every file ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_every_config_parses_with_its_scripts_class(name):
    config = read(name.removesuffix(".yml"))
    for field in ("generate_config", "evaluate_config"):
        file = getattr(config, field, None)
        assert file is None or (ROOT / file).is_file()
    if getattr(config, "output_global_parent_dir", None):
        assert config.output_dir == name.removesuffix(".yml")  # so that no two runs share a folder


@pytest.mark.parametrize("name", FILES + LAUNCH_FILES)
def test_no_key_stands_twice_and_every_file_named_is_there(name):
    text = (CONFIGS / name).read_text(encoding="utf-8")
    assert twice(text) == []
    for file in re.findall(r"configs/[\w.]+\.ya?ml", text):
        assert (ROOT / file).is_file(), file


def twice(text: str) -> list[str]:
    """Keys that a mapping holds more than once: `yaml.safe_load` keeps the last one and says nothing."""
    found, nodes = [], [yaml.compose(text)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, yaml.MappingNode):
            keys = [key.value for key, _ in node.value]
            found += sorted({key for key in keys if keys.count(key) > 1})
            nodes += [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value
    return found


def test_a_key_that_stands_twice_is_found_at_any_depth():
    assert twice("a: 1\nb: {c: 1, d: [{e: 1, e: 2}], c: 2}\na: 3\n") == ["a", "c", "e"]


@pytest.mark.parametrize(("name", "stage", "processes"), [("deepspeed_zero2.yaml", 2, 3), ("deepspeed_zero3.yaml", 3, 7)])
def test_launch_files_are_accelerates(name, stage, processes):
    assert name in LAUNCH_FILES and len(LAUNCH_FILES) == 2
    config = load_config_from_file(str(CONFIGS / name))
    assert (config.deepspeed_config["zero_stage"], config.num_processes, config.mixed_precision) == (stage, processes, "bf16")
    assert config.deepspeed_config.get("zero3_save_16bit_model", False) is (stage == 3)


# -- dry runs -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder to work in as in a checkout, with small stand-ins for what earlier stages leave in results/."""
    folder = tmp_path_factory.mktemp("workplace")
    for name in ("configs", "checkpoints"):
        (folder / name).symlink_to(ROOT / name)
    for model in ("rm_tiny", "sft_llama8b_chat", "rm_llama8b_chat", "onlinedpo_tiny/checkpoint-24"):
        (folder / "results" / model).mkdir(parents=True)
        (folder / "results" / model / "config.json").write_text("{}")
    pairs = [{"prompt": f"p{i}", "chosen": "c", "rejected": "r"} for i in range(100)]
    for name in ("pairs_tiny", "relabel_rm"):
        DatasetDict({"train": Dataset.from_list(pairs)}).save_to_disk(folder / "results" / name)
    post = {"post": "A long day.", "summary": "Long.", "chosen": " Long.", "rejected": " Short."}
    (folder / "posts.jsonl").write_text(json.dumps(post) + "\n")
    return folder


POSTS = ("--dataset_name=posts.jsonl", "--eval_split=train")
EXTRA = {  # what the files leave to the command line
    "generate": ("--model_name_or_path=results/onlinedpo_tiny",),
    "evaluate": ("--model_name_or_path=results/onlinedpo_tiny",),
    "relabel": ("--output_dir=results/new",),
    "generate_smollm2_tldr.yml": POSTS,
    "evaluate_smollm2_tldr.yml": ("--gold_reward_model_path=results/rm_tiny",),
    "onlinedpo_smollm2_tldr.yml": (*POSTS, "--model_name_or_path=checkpoints/sft_docstrings", "--reward_model_path=results/rm_tiny"),
    "rm_minilm_tldr.yml": (*POSTS, "--model_name_or_path=checkpoints/sft_docstrings"),
}
PROCESSES = {f"onlinedpo_{name}.yml": processes for name, processes, *_ in ONLINE_DPO}
PROCESSES |= {f"{name}.yml": processes for name, processes, *_ in POLICY_GRADIENT}


@pytest.mark.parametrize("name", FILES)
def test_every_config_takes_a_dry_run_without_the_hub(name, workplace, monkeypatch, capsys):
    kind = name.split("_")[0]
    script, config_class = SCRIPTS[kind]
    arguments = ["--config", f"configs/{name}", *EXTRA.get(kind, ()), *EXTRA.get(name, ())]
    before = sorted(workplace.rglob("*"))
    monkeypatch.chdir(workplace)
    monkeypatch.setattr(os, "environ", os.environ.copy())  # a script tells its trackers of the run there
    monkeypatch.setattr(sys, "argv", [script.__name__, *arguments, "--dry_run"])
    if kind in LOOP:
        monkeypatch.setenv("WORLD_SIZE", str(PROCESSES.get(name, 1)))
    script.main()
    said = capsys.readouterr().out
    config = parse(config_class, arguments)
    if kind in LOOP:
        assert BatchPlan.of(config, PROCESSES.get(name, 1)).describe(config) in said
    data = getattr(config, "dataset_name", None)
    assert data is None or f"{data} on the hub, read when the run starts" in said or (is_local(data) and f"rows of {data}" in said)
    assert said.count("\n") >= 1 + (data is not None)
    assert sorted(workplace.rglob("*")) == before
