"""LoRA adapters on one frozen base: policy, value model and reward as three of them, the reference as none."""

import json
import sys

import pytest
import torch
from conftest import NEOX
from peft import AutoPeftModelForSequenceClassification, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_run import settings
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import reward_modeling
from async_rlhf.adapters import REWARD, VALUE, TrunkClassifier, adapter, checkpoint_activations, shares_base
from async_rlhf.config import UserError, parse
from async_rlhf.dry_run import check_paths
from async_rlhf.models import Policy, lora_config, pad_tokens, save_model, scratch_causal_lm
from async_rlhf.rewards import Sample
from async_rlhf.rewards.model import RewardModel
from async_rlhf.trainer import Trainer
from async_rlhf.value import ActorCritic, ValueModel, load_value_model, value_on_trunk
from async_rlhf.weights import adapter_parameters, plain_model, whole_weights
from ppo import PPO, PPOConfig
from reward_modeling import RewardModelingConfig

LORA = dict(use_peft=True, lora_r=4, lora_target_modules=["q_proj", "up_proj", "lm_head"])
TOKENS = pad_tokens([[5, 6, 7], [8]], [[[9, 10, 11], [12]], [[13, 14], [15, 16]]], 0)


def randomize(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


@pytest.fixture(scope="module")
def reward_folder(model_folder, tokenizer, tmp_path_factory):
    """A PEFT folder with a head: other modules and another rank than the policy's."""
    folder = tmp_path_factory.mktemp("reward") / "adapter"
    model = AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=1, dtype=torch.float32)
    lora = LoraConfig(r=2, lora_dropout=0.5, target_modules=["v_proj", "up_proj"], task_type="SEQ_CLS", modules_to_save=["score"])
    model = get_peft_model(model, lora)
    randomize([parameter for parameter in model.parameters() if parameter.requires_grad], 0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def config(model_folder, prompts_file, reward_file, tmp_path):
    return settings(model_folder, prompts_file, reward_file, tmp_path / "run", PPOConfig, share_trunk=True, max_staleness=1, **LORA)


def policy_of(config, targets=None):
    model = AutoModelForCausalLM.from_pretrained(config.model_name_or_path, dtype=torch.float32)
    lora = lora_config(config)
    lora.target_modules = targets or ["q_proj", "up_proj"]
    return get_peft_model(model, lora)


def gradients(module, tokens=TOKENS):
    """Of one graph with both forwards, by part; and what the forwards gave."""
    logprobs, values = module(**tokens, temperature=0.7)
    (logprobs * torch.linspace(0.5, 1, logprobs.numel()).view_as(logprobs)).sum().add(values.square().sum()).backward()
    parts = module.parameter_groups()
    return logprobs, values, {part: [parameter.grad for parameter in parameters] for part, parameters in parts.items()}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_shared_trunk_computes_what_two_models_do(config, checkpointing):
    """Log-probabilities, values and gradients, the same adapters copied into both arrangements."""
    trunk = policy_of(config)
    shared = ActorCritic(Policy(trunk), ValueModel(value_on_trunk(config, trunk, None))).train()
    parts = shared.parameter_groups()
    for seed, part in enumerate(parts):
        randomize(parts[part], seed)
    apart = ActorCritic(Policy(policy_of(config)), ValueModel(load_value_model(config, config.model_name_or_path, None, False))).train()
    for part, parameters in apart.parameter_groups().items():
        for ours, theirs in zip(parameters, parts[part], strict=True):
            ours.data.copy_(theirs.data)
    if checkpointing:
        checkpoint_activations(trunk)
    (logprobs, values, got), (expected_logprobs, expected_values, expected) = gradients(shared), gradients(apart)
    for a, b in ((logprobs, expected_logprobs), (values, expected_values)):
        assert (a - b).norm() <= 1e-6 * b.norm()
    for part in ("policy", "value"):
        assert len(got[part]) == {"policy": 8, "value": 9}[part]
        for a, b in zip(got[part], expected[part], strict=True):
            assert b.norm() > 0 and (a - b).norm() <= 1e-5 * b.norm()
    assert all(p.requires_grad == (id(p) in {id(q) for part in parts.values() for q in part}) for p in shared.parameters())


def test_the_reference_is_the_base_itself(config):
    trunk = policy_of(config)
    value = value_on_trunk(config, trunk, None)
    randomize([*adapter_parameters(trunk, "default"), *value.own_parameters()], 0)
    flags = [parameter.requires_grad for parameter in trunk.parameters()]
    base = Policy(AutoModelForCausalLM.from_pretrained(config.model_name_or_path, dtype=torch.float32))
    with torch.no_grad():
        with adapter(trunk, None):
            assert torch.equal(Policy(trunk)(**TOKENS), base(**TOKENS))
        assert not torch.equal(Policy(trunk)(**TOKENS), base(**TOKENS))
    assert flags == [parameter.requires_grad for parameter in trunk.parameters()] and any(flags)


def test_only_the_policys_adapter_is_merged(config):
    """With the value model's chosen, and untouched by all that."""
    trunk = policy_of(config)
    expected = dict(whole_weights(trunk))
    randomize(adapter_parameters(trunk, "default"), 0)
    alone = {name: tensor.clone() for name, tensor in whole_weights(trunk)}
    randomize(value_on_trunk(config, trunk, None).own_parameters(), 1)
    before = {name: tensor.clone() for name, tensor in trunk.state_dict().items()}
    with adapter(trunk, VALUE):
        weights = dict(whole_weights(trunk))
    assert weights.keys() == expected.keys() and all(torch.equal(weights[name], tensor) for name, tensor in alone.items())
    assert not all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    assert all(torch.equal(before[name], tensor) for name, tensor in trunk.state_dict().items())


def samples(tokenizer):
    texts = [("The cat sees", " the dog."), ("A", " bird"), ("The whale hears the", " snake and the mouse.")]
    return [Sample(p, r, tokenizer(p)["input_ids"], tokenizer(r)["input_ids"] + [tokenizer.eos_token_id]) for p, r in texts]


def test_a_reward_adapter_scores_the_same_alone_and_on_the_trunk(config, reward_folder, tokenizer):
    """And as peft's own model says of each text alone; the trunk is in its old state afterwards."""
    assert shares_base(str(reward_folder), config)
    trunk = policy_of(config).train()
    randomize(adapter_parameters(trunk, "default"), 3)
    before = [(parameter, parameter.detach().clone(), parameter.requires_grad) for parameter in trunk.parameters()]
    reward = RewardModel(str(reward_folder), policy_tokenizer=tokenizer, trunk=trunk)
    scores = reward(samples(tokenizer))
    assert trunk.training and all(module.training for module in trunk.modules()) and trunk.active_adapters == ["default"]
    assert all(torch.equal(parameter, old) and parameter.requires_grad == flag for parameter, old, flag in before)
    assert not any(parameter.requires_grad for parameter in reward.model.own_parameters())

    alone = RewardModel(str(reward_folder), policy_tokenizer=tokenizer)
    torch.testing.assert_close(scores, alone(samples(tokenizer)), atol=1e-6, rtol=1e-5)
    peft = AutoPeftModelForSequenceClassification.from_pretrained(reward_folder, num_labels=1).eval()
    for sample, score in zip(samples(tokenizer), scores, strict=True):
        ids = torch.tensor([sample.prompt_ids + sample.response_ids])
        with torch.no_grad():
            assert score.item() == pytest.approx(peft(ids).logits.item(), abs=1e-6)
    assert scores.std() > 1e-3


def test_a_run_on_one_trunk_trains_two_adapters_and_saves_whole_models(config, reward_folder, model_folder, tokenizer):
    """Reward, reference, policy and value model in the memory of one base, which no update touches."""
    config.reward_model_path, config.lora_target_modules, config.weight_decay = str(reward_folder), ["q_proj", "up_proj"], 0.1
    trainer = Trainer(config, PPO(config))
    module, reward = trainer.optimizer.unwrapped, trainer.rewards.parts[0].reward
    base = dict(AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).named_parameters())
    value = module.value.model
    tensors = {p.data_ptr(): p for p in [*module.parameters(), *reward.model.parameters()]}
    own = {id(p) for p in [*adapter_parameters(value.trunk, "default"), *value.own_parameters(), *reward.model.own_parameters()]}
    assert trainer.reference.policy is module.policy and isinstance(reward.model, TrunkClassifier)
    assert sum(p.numel() for p in tensors.values() if id(p) not in own) == sum(p.numel() for p in base.values())

    trained = [p for group in trainer.optimizer.adamw.param_groups for p in group["params"]]
    rewards = adapter_parameters(value.trunk, REWARD)
    assert {id(p) for p in trained} == own - {id(p) for p in reward.model.own_parameters()}
    for ours, theirs in zip(value.own_parameters(), reward.model.own_parameters(), strict=True):
        assert torch.equal(ours, theirs)  # where the value model starts
    assert value.trunk.peft_config[VALUE].lora_dropout == 0  # the run's, not the folder's
    start = [p.detach().clone() for p in trained]
    kept = [p.detach().clone() for p in rewards]
    trainer.run()

    assert all(p.requires_grad for p in trained) and not any(map(torch.equal, start, trained))
    assert all(map(torch.equal, kept, rewards))
    frozen = {name.replace(".base_layer.", ".").removeprefix("base_model.model."): p for name, p in value.trunk.named_parameters()}
    assert all(torch.equal(frozen[name], p) for name, p in base.items())
    records = [json.loads(line) for line in (trainer.output / "metrics.jsonl").read_text().splitlines()]
    assert max(record["mismatch/logprob_abs"] for record in records) < 1e-4  # the generator samples from the merged policy

    folder = trainer.output / "checkpoint-4"
    policy, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    critic, others = AutoModelForSequenceClassification.from_pretrained(
        folder / "value_model", dtype=torch.float32, output_loading_info=True
    )
    assert not any(found["missing_keys"] or found["unexpected_keys"] for found in (report, others))
    with torch.no_grad():
        logprobs, values = module.eval()(**TOKENS)
        loaded = ActorCritic(Policy(policy), ValueModel(critic)).eval()
        torch.testing.assert_close(loaded(**TOKENS), (logprobs, values), atol=1e-5, rtol=1e-5)
        assert values.abs().max() > 0


def test_a_value_model_starts_fresh_or_from_an_adapter(config, reward_folder):
    trunk = policy_of(config)
    fresh = value_on_trunk(config, trunk, config.model_name_or_path)
    assert not any(".lm_head." in name and ".value." in name for name, _ in trunk.named_parameters())
    randomize(adapter_parameters(trunk, VALUE), 0)
    with torch.no_grad():
        assert ValueModel(fresh)(**TOKENS).abs().max() == 0
    from_folder = value_on_trunk(config, policy_of(config), str(reward_folder))
    saved = load_file(reward_folder / "adapter_model.safetensors")
    assert torch.equal(from_folder.score.weight, saved["base_model.model.score.weight"])
    assert len(adapter_parameters(from_folder.trunk, VALUE)) == len(saved) - 1
    apart = load_value_model(config, str(reward_folder), None, False)  # merged into a base of its own, under a fresh adapter
    with torch.no_grad():
        torch.testing.assert_close(ValueModel(apart)(**TOKENS), ValueModel(from_folder)(**TOKENS), atol=1e-6, rtol=1e-5)


def test_another_architecture_shares_its_trunk(config, tokenizer, tmp_path):
    """GPT-NeoX, whose layers and head have other names: the saved value model is the one that was trained."""
    save_model(scratch_causal_lm(NEOX, tokenizer, 0), tokenizer, tmp_path / "neox")
    config.model_name_or_path, config.lora_target_modules = str(tmp_path / "neox"), None
    trunk = policy_of(config, ["query_key_value"])
    value = value_on_trunk(config, trunk, None)
    randomize(value.own_parameters(), 0)
    model, state = plain_model(value)
    model.save_pretrained(tmp_path / "value", state_dict=state)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "value", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(ValueModel(loaded)(**TOKENS), ValueModel(value)(**TOKENS), atol=1e-5, rtol=1e-5)


def test_a_reward_model_can_keep_its_adapter(model_folder, tmp_path, monkeypatch, config, tokenizer):
    """The same training saved merged, and as an adapter that is loaded with its base and on a trunk: the same scores."""
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"prompt": "The cat", "chosen": " sees a dog.", "rejected": f" {i}"}) + "\n" for i in range(4)))
    fields = [
        *(f"--model_name_or_path={model_folder}", f"--dataset_name={pairs}", "--max_length=48", "--max_steps=1", "--eval_strategy=no"),
        *("--use_peft", "--lora_target_modules", "q_proj", "--learning_rate=1e-2", "--use_cpu", "--save_strategy=no"),
    ]
    for name, keep in (("merged", []), ("kept", ["--keep_adapter"])):
        monkeypatch.setattr(sys, "argv", ["reward_modeling.py", *fields, *keep, f"--output_dir={tmp_path / name}"])
        reward_modeling.main()
    saved = load_file(tmp_path / "kept" / "adapter_model.safetensors")
    assert all(".lora_" in name or ".score." in name for name in saved)
    places = (("merged", None), ("kept", None), ("kept", policy_of(config)))
    merged, *kept = (
        RewardModel(str(tmp_path / name), policy_tokenizer=tokenizer, trunk=trunk)(samples(tokenizer)) for name, trunk in places
    )
    for scores in kept:
        torch.testing.assert_close(scores, merged, atol=1e-6, rtol=1e-5)


def altered(folder, to, config=None, weights=None):
    """A copy of an adapter's folder with another configuration or other weights."""
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    values = json.loads((folder / "adapter_config.json").read_text()) | (config or {})
    (to / "adapter_config.json").write_text(json.dumps(values))
    save_file(weights or load_file(folder / "adapter_model.safetensors"), to / "adapter_model.safetensors")
    return str(to)


def test_what_fits_no_trunk_is_refused_in_one_line(config, reward_folder, model_folder, tmp_path):
    for changes, message in (
        ({"share_trunk": True}, "share_trunk: adapters share a trunk, so it needs use_peft"),
        ({"share_trunk": True, "use_peft": True, "sft_model_path": "b", "model_name_or_path": "a"}, "with use_peft the reference is"),
    ):
        with pytest.raises(UserError, match=message):
            parse(PPOConfig, [f"--{name}={value}" for name, value in changes.items()])
    with pytest.raises(UserError, match="keep_adapter: there is an adapter with use_peft alone"):
        parse(RewardModelingConfig, ["--keep_adapter", "--use_cpu"])

    check_paths(config)
    whole = tmp_path / "whole"
    AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=1).save_pretrained(whole)
    foreign = altered(reward_folder, tmp_path / "foreign", {"base_model_name_or_path": str(whole)})
    for path in (str(whole), foreign):
        config.value_model_path = path
        with pytest.raises(UserError, match="value_model_path .*: a model with a base of its own; with share_trunk name a LoRA adapter"):
            check_paths(config)
    config.value_model_path = str(reward_folder)
    check_paths(config)

    weights = load_file(reward_folder / "adapter_model.safetensors")
    headless = {name: tensor for name, tensor in weights.items() if ".score." not in name}
    gone = altered(reward_folder, tmp_path / "gone", {"base_model_name_or_path": str(tmp_path / "absent")})
    nohead = altered(reward_folder, tmp_path / "headless", weights=headless)
    wide = altered(reward_folder, tmp_path / "wide", weights=weights | {"base_model.model.score.weight": torch.zeros(2, 64)})
    biased = altered(reward_folder, tmp_path / "biased", {"bias": "all"})
    whole_rows = {"base_model.model.model.embed_tokens.weight": torch.zeros(3, 64)}
    embedding = altered(reward_folder, tmp_path / "embedding", weights=weights | whole_rows)
    missing = altered(reward_folder, tmp_path / "missing", {"target_modules": ["v_proj", "up_proj", "k_proj"]})
    for path, on_trunk, message in (
        (gone, False, "it is an adapter of '.*absent', which does not load; mend base_model_name_or_path"),
        (nohead, False, "the adapter has no score head"),
        (nohead, True, "the adapter has no score head"),
        (wide, False, "size mismatch"),
        (wide, True, "does not fit the trunk"),
        (biased, True, "besides LoRA it changes the base"),
        (embedding, True, "embed_tokens"),
        (missing, True, "does not fit the trunk"),
    ):
        with pytest.raises(UserError, match=f"no reward model at .*{message}") as caught:
            RewardModel(path, trunk=policy_of(config) if on_trunk else None)
        assert "\n" not in str(caught.value)
