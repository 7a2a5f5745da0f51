"""Optimizer steps beyond plain float32: float16 with a gradient scaler, and DeepSpeed ZeRO-2 on two processes."""

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from conftest import ROOT
from safetensors.torch import load_file
from tiny_run import settings, train
from transformers import AutoModelForCausalLM

import async_rlhf.trainer
from async_rlhf.config import UserError, parse
from async_rlhf.optimization import ModuleOptimizer, open_accelerator
from online_dpo import OnlineDPOConfig

OLD_GPU = ["--fp16", "--bf16", "False", "--torch_dtype", "float16"]  # as users of GPUs without bfloat16 type it


@pytest.fixture
def emulate_float16(monkeypatch):
    """What Accelerate sets up on a GPU for fp16, with torch's float16 autocast and scaler for the CPU: it refuses to do so itself."""

    def install(init_scale: float) -> list[Accelerator]:
        opened = []

        def open_emulated(config) -> Accelerator:
            accelerator = Accelerator(project_dir=config.output_dir)
            monkeypatch.setitem(AcceleratorState._shared_state, "_mixed_precision", "fp16")  # shared by all accelerators
            accelerator.native_amp = True
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
            opened.append(accelerator)
            return accelerator

        monkeypatch.setattr(async_rlhf.trainer, "open_accelerator", open_emulated)
        return opened

    return install


def test_fp16_trains_float32_weights_with_a_scaler_and_publishes_float16(
    model_folder, prompts_file, reward_file, tmp_path, monkeypatch, emulate_float16
):
    emulate_float16(2.0**10)
    published, loads, engines = set(), [], []
    original, load = async_rlhf.trainer.whole_weights, async_rlhf.trainer.load_causal_lm
    monkeypatch.setattr(async_rlhf.trainer, "load_causal_lm", lambda *args, **kwargs: loads.append(load(*args, **kwargs)) or loads[-1])

    open_generator = async_rlhf.trainer.open_generator
    monkeypatch.setattr(
        async_rlhf.trainer, "open_generator", lambda *args, **kwargs: engines.append(args[3]) or open_generator(*args, **kwargs)
    )

    def record(model, dtype):
        for name, tensor in original(model, dtype):
            published.add(tensor.dtype)
            yield name, tensor

    monkeypatch.setattr(async_rlhf.trainer, "whole_weights", record)
    config = settings(
        model_folder, prompts_file, reward_file, tmp_path / "run", fp16=True, torch_dtype="float16", max_staleness=1, save_steps=4
    )
    metrics, model = train(config)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert [loaded.dtype for loaded in loads] == [torch.float32, torch.float16]  # the policy, and the frozen reference
    assert published == {torch.float16} and engines == ["float16"]
    saved = load_file(tmp_path / "run" / "checkpoint-4" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    start = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters(), strict=True))
    assert metrics[0]["loss/policy"] == pytest.approx(math.log(2), abs=1e-3)


def test_an_overflowing_fp16_step_is_skipped_and_the_scale_lowered(model_folder, prompts_file, reward_file, tmp_path, emulate_float16):
    accelerators = emulate_float16(2.0**120)
    _, model = train(settings(model_folder, prompts_file, reward_file, tmp_path / "run", fp16=True))
    assert accelerators[0].scaler.get_scale() == 2.0**116  # halved at each of the four steps
    start = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters(), strict=True))


def test_fp16_as_typed_parses_and_is_refused_on_a_cpu_before_any_model(tmp_path):
    config = parse(OnlineDPOConfig, OLD_GPU)
    assert (config.fp16, config.bf16, config.torch_dtype) == (True, False, "float16")
    with pytest.raises(UserError, match="fp16 needs a GPU"):
        open_accelerator(config)
    with pytest.raises(UserError, match="torch_dtype float16 trains with a gradient scaler only: add fp16"):
        parse(OnlineDPOConfig, ["--torch_dtype", "float16"])


class Pair(torch.nn.Module):
    """Two parts, each a weight of two numbers."""

    def __init__(self):
        super().__init__()
        self.policy, self.value = (torch.nn.Linear(2, 1, bias=False) for _ in range(2))
        torch.nn.init.constant_(self.policy.weight, 1.0)
        torch.nn.init.constant_(self.value.weight, 1.0)

    def parameter_groups(self):
        return {"policy": [self.policy.weight], "value": [self.value.weight]}

    def forward(self, policy: float):
        return policy * self.policy(torch.tensor([2.0, -3.0])).sum() + self.value(torch.ones(2)).sum()


def test_a_held_part_begins_afresh(prompts_file, model_folder, reward_file, tmp_path):
    """Three steps without the policy, with weight decay: its weights stay, and AdamW's first step on it is then that of step 1, lr
    against the gradient's sign after a decay of lr · 0.5; counted as step 4 it would be 0.58 of that, 0.1 / (1 − 0.9⁴) over
    √(0.001 / (1 − 0.999⁴)). The value has gone 4 steps."""
    config = settings(
        model_folder,
        prompts_file,
        reward_file,
        tmp_path,
        learning_rate=0.1,
        weight_decay=0.5,
        lr_scheduler_type="constant",
        max_grad_norm=1e9,
    )
    pair = Pair()
    optimizer = ModuleOptimizer(Accelerator(), config, pair, 4)
    for step in range(4):
        warm = step < 3
        optimizer.step([float(not warm)], 1, lambda module, policy: module(policy), ("policy",) if warm else ())
        if warm:
            assert pair.policy.weight.tolist() == [[1.0, 1.0]]
        assert optimizer.learning_rate == 0.1
    expected = 1.0
    for _ in range(4):
        expected = expected * 0.95 - 0.1
    assert pair.policy.weight.tolist()[0] == pytest.approx([0.95 - 0.1, 0.95 + 0.1], abs=1e-6)
    assert pair.value.weight.tolist()[0] == pytest.approx([expected, expected], abs=1e-5)
    assert float(optimizer.adamw.state[pair.policy.weight]["step"]) == 1 and float(optimizer.adamw.state[pair.value.weight]["step"]) == 4


@pytest.mark.full  # two minutes; test_sharded_reward.py steps a ZeRO-2 engine on two ranks
def test_zero2_on_two_processes_trains_like_one_process(model_folder, prompts_file, reward_file, tmp_path):
    """Optimizer state and gradients sharded over two processes, two forwards accumulated: the losses and weights of plain AdamW."""
    one = [sys.executable, ROOT / "online_dpo.py"]
    two = [
        *(Path(sys.executable).parent / "accelerate", "launch", "--config_file", ROOT / "configs" / "deepspeed_zero2.yaml"),
        *("--mixed_precision", "no", "--num_processes", 2, "--main_process_port", free_port(), ROOT / "online_dpo.py"),
    ]
    records, weights = [], []
    for processes, command in ((1, one), (2, two)):
        output = tmp_path / str(processes)
        fields = [
            *(f"--dataset_name={prompts_file}", "--prompt_column=text", f"--model_name_or_path={model_folder}"),
            *(f"--reward_model_path={reward_file}:letters", f"--output_dir={output}", "--generator=hf", "--max_staleness=1"),
            *("--response_length=6", "--max_prompt_length=32", f"--per_device_train_batch_size={4 // processes}"),
            *("--gradient_accumulation_steps=2", "--num_mini_batches=2", "--total_episodes=64", "--learning_rate=1e-3", "--save_steps=100"),
        ]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        done = subprocess.run(list(map(str, command + fields)), capture_output=True, text=True, timeout=300, env=env)
        assert done.returncode == 0, done.stderr[-4000:]
        records.append([json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()])
        weights.append(load_file(output / "checkpoint-4" / "model.safetensors"))
        record = json.loads((output / "run_config.json").read_text())
        assert (record["processes"], record["sharding"]) == (processes, "none" if processes == 1 else "ZeRO-2")
    for alone, sharded in zip(*records, strict=True):
        for name in ("loss/policy", "objective/score", "objective/kl", "lr", "staleness/steps_mean"):
            assert sharded[name] == pytest.approx(alone[name], abs=1e-5), name
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, atol=2e-4, rtol=0)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]
