"""The real engine: after every weight update it answers with the trainer's numbers."""

import json
import os
import signal
import threading
import time

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from async_rlhf.config import GeneratorConfig, UserError
from async_rlhf.engine_process import DISTRIBUTED_VARIABLES
from async_rlhf.generation import EngineFailure, HFGenerator, Sampling
from async_rlhf.models import Policy, pad_tokens
from async_rlhf.reaper import marked
from async_rlhf.rollout import Prompt
from async_rlhf.vllm_utils import check_engine_model, choose_device, open_generator, trainer_cores
from async_rlhf.weights import WeightStore, whole_weights

PROMPTS = [Prompt(i, i, list(range(30, 34 + 3 * i))) for i in range(6)]


def disturbed(folder, seed):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=noise))
    return model


@pytest.mark.parametrize("embeddings", ["tied", pytest.param("untied", marks=pytest.mark.full)])
def test_after_each_update_the_engine_agrees_with_the_trainer(embeddings, model_folder, neox_folder, tokenizer):
    folder = str(model_folder if embeddings == "tied" else neox_folder)
    sampling = Sampling(n=2, max_tokens=8, end_ids=(tokenizer.eos_token_id,), temperature=0.7, seed=1)
    probe = PROMPTS[5].ids
    store = WeightStore(keep=2)
    generator = open_generator(GeneratorConfig(), folder, tokenizer, "float32", max_model_len=48)
    try:
        answers = []
        for version in range(3):
            model = disturbed(folder, version)
            generator.load_weights(store.publish(version, version, whole_weights(model)))
            expected = HFGenerator(model, 0).score(probe)
            assert max(abs(a - b) for a, b in zip(generator.score(probe), expected, strict=True)) < 1e-4
            rollouts = generator.generate(PROMPTS, sampling)
            assert [(r.position, r.sample) for r in rollouts] == [(p.position, s) for p in PROMPTS for s in range(2)]
            assert {v for r in rollouts for v in r.versions} == {version}
            responses = [[rollouts[2 * i + j].response_ids for j in range(2)] for i in range(len(PROMPTS))]
            with torch.no_grad():
                logprobs = Policy(model)(**pad_tokens([p.ids for p in PROMPTS], responses, 0), temperature=0.7).flatten(0, 1)
            for rollout, row in zip(rollouts, logprobs, strict=True):  # sampled after the update, prompts seen before it included
                torch.testing.assert_close(torch.tensor(rollout.logprobs), row[: len(rollout.logprobs)], atol=1e-4, rtol=0)
                assert (rollout.finish_reason == "stop") == (rollout.response_ids[-1] == tokenizer.eos_token_id)
            answers.append([r.response_ids for r in rollouts])
            assert [r.response_ids for r in generator.generate(PROMPTS[::-1], sampling)][::-1][1::2] == answers[-1][0::2]
        assert answers[0] != answers[1] != answers[2]
        if embeddings == "untied":
            check_that_a_death_is_noticed(generator)
    finally:
        generator.close()
        store.close()
    assert marked(generator._process._mark) == []


def check_that_a_death_is_noticed(generator):
    """Its processes are killed once a completion has finished: an `EngineFailure` says so soon, and what had finished is there. Signals
    that are the trainer's to act on change nothing."""
    processes, finished = marked(generator._process._mark), {}
    assert len(processes) >= 2

    def kill():
        while not finished:
            time.sleep(0.001)
        for pid in processes:
            os.kill(pid, signal.SIGKILL)
        killed.append(time.monotonic())

    for pid in processes:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(pid, number)
    killed, many = [], [Prompt(i, i, PROMPTS[5].ids) for i in range(100)]
    threading.Thread(target=kill).start()
    with pytest.raises(EngineFailure, match="EngineCore ended with -9"):
        generator.generate(many, Sampling(n=4, max_tokens=28, end_ids=(), temperature=1.0), finished)
    assert time.monotonic() - killed[0] < 20
    assert 0 < len(finished) < 400
    with pytest.raises(EngineFailure):
        generator.score(PROMPTS[0].ids)


def test_asynchronous_online_dpo_from_the_command_line(model_folder, prompts_file, reward_file, tmp_path, run_script):
    run_script(
        "online_dpo.py", f"--dataset_name={prompts_file}", "--prompt_column=text", "--model_name_or_path", model_folder,
        "--reward_model_path", f"{reward_file}:letters", "--output_dir", tmp_path / "run", "--max_prompt_length=32",
        "--response_length=8", "--per_device_train_batch_size=16", "--total_episodes=64", "--learning_rate=1e-3", "--save_steps=2",
        "--eval_split=train[:8]", "--eval_steps=2",
    )  # fmt: skip
    metrics = [json.loads(line) for line in open(tmp_path / "run" / "metrics.jsonl")]
    assert [record["version"] for record in metrics] == [0, 0, 1, 2]
    assert [record["staleness/batches_max"] for record in metrics] == [0, 1, 1, 1]
    assert all(record["mismatch/logprob_abs"] < 1e-4 for record in metrics if "mismatch/logprob_abs" in record)
    assert metrics[0]["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    for checkpoint in ("checkpoint-2", "checkpoint-4"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "run" / checkpoint)
        AutoTokenizer.from_pretrained(tmp_path / "run" / checkpoint)


def test_devices(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_device(None, 1) == "cpu:3"
    assert choose_device("cpu:1,2", 1) == "cpu:1,2"
    assert trainer_cores("cpu:1,2") == [0, 3]
    assert trainer_cores("cuda:0") == [0, 1, 2, 3]
    for device in ("cuda:0", "cpu:9", "gpu:1", "cpu"):
        with pytest.raises(UserError, match="vllm_device"):
            choose_device(device, 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert choose_device(None, 3) == "cuda:3"
    assert choose_device(None, 4) == "cuda:0"
    with pytest.raises(UserError, match="cuda:0 to cuda:3"):
        choose_device("cuda:4", 3)


def test_a_model_that_a_cpu_engine_cannot_run_is_refused():
    narrow = AutoConfig.for_model("llama", hidden_size=64, num_attention_heads=4, num_key_value_heads=4)
    with pytest.raises(UserError, match="heads are 16 wide"):
        check_engine_model(narrow, "cpu:1")
    check_engine_model(narrow, "cuda:0")


def test_variables_of_the_process_group_do_not_reach_the_engine():
    leaking = [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "ACCELERATE_USE_FSDP",
        "OMP_NUM_THREADS",
    ]
    assert all(DISTRIBUTED_VARIABLES.fullmatch(name) for name in leaking)
    assert not any(DISTRIBUTED_VARIABLES.fullmatch(name) for name in ("PATH", "HOME", "HF_HOME", "CUDA_VISIBLE_DEVICES"))
