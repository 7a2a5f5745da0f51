import copy
import threading

import pytest
import torch
from conftest import LLAMA, NEOX
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from async_rlhf.models import scratch_causal_lm
from async_rlhf.weights import WeightStore, whole_weights


@pytest.fixture
def store(tmp_path):
    store = WeightStore(keep=2, folder=tmp_path)
    yield store
    store.close()
    assert not any(tmp_path.iterdir())


def test_tied_weights_travel_once_and_untied_ones_both(tokenizer):
    tied = dict(whole_weights(scratch_causal_lm(LLAMA, tokenizer, 0)))
    untied = dict(whole_weights(scratch_causal_lm(NEOX, tokenizer, 0)))
    assert "lm_head.weight" not in tied
    assert len([name for name in untied if name.startswith(("lm_head", "embed_out", "gpt_neox.embed_in"))]) == 2


def test_lora_travels_merged_and_the_model_is_untouched(tokenizer):
    model = scratch_causal_lm(LLAMA, tokenizer, 0)
    plain = copy.deepcopy(model)
    lora = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in lora.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    before = {name: tensor.clone() for name, tensor in lora.state_dict().items()}
    weights = dict(whole_weights(lora))
    assert weights.keys() == dict(plain.named_parameters()).keys()
    plain.load_state_dict(weights, strict=False)
    ids = torch.tensor([[40, 41, 42, 43]])
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, lora(ids).logits, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(before[name], tensor) for name, tensor in lora.state_dict().items())


def test_a_snapshot_is_immutable(store):
    weight = torch.ones(3)
    snapshot = store.publish(0, 0, [("w", weight)])
    weight.zero_()
    assert load_file(snapshot.path)["w"].tolist() == [1.0, 1.0, 1.0]


def test_old_snapshots_go_but_not_one_that_is_being_read(store):
    for version in range(2):
        store.publish(version, version, [("w", torch.ones(1))])
    with store.reading(0, newest=False, timeout=1, stop=threading.Event()) as snapshot:
        store.publish(2, 2, [("w", torch.ones(1))])
        assert snapshot.path.exists()
        assert store.latest().version == 2
    assert not snapshot.path.exists()


@pytest.mark.parametrize("changed", [("v", torch.ones(1)), ("w", torch.ones(2))], ids=["name", "shape"])
def test_changed_names_or_shapes_are_refused_before_an_engine_sees_them(store, changed):
    store.publish(0, 0, [("w", torch.ones(1))])
    with pytest.raises(ValueError, match="snapshot 1: names or shapes changed"):
        store.publish(1, 1, [changed])
