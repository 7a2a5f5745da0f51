import copy

import pytest
import torch
from conftest import LLAMA

from async_rlhf.generation import FakeGenerator, HFGenerator, ReplayGenerator, Sampling
from async_rlhf.models import Policy, pad_tokens, scratch_causal_lm
from async_rlhf.rollout import Prompt, read_rollouts, write_rollouts
from async_rlhf.weights import WeightStore, whole_weights

PROMPTS = [Prompt(7, 0, [40, 41, 42, 43, 44]), Prompt(8, 1, [50, 51]), Prompt(9, 2, [60, 61, 62])]


@pytest.fixture(scope="module")
def model(tokenizer):
    return scratch_causal_lm(LLAMA, tokenizer, seed=5).eval()


def key(rollouts):
    return {(r.position, r.sample): r.response_ids for r in rollouts}


def test_rollouts_carry_the_samplers_own_logprobs(model):
    sampling = Sampling(n=3, max_tokens=8, end_ids=(1,), temperature=0.7, seed=1)
    generator = HFGenerator(model, pad_token_id=1, shared=True)
    generator.version = 4
    rollouts = generator.generate(PROMPTS, sampling)
    assert [(r.position, r.sample) for r in rollouts] == [(p, s) for p in (7, 8, 9) for s in range(3)]
    tokens = pad_tokens([p.ids for p in PROMPTS], [[rollouts[3 * i + j].response_ids for j in range(3)] for i in range(3)], 0)
    with torch.no_grad():
        expected = Policy(model)(**tokens, temperature=0.7).flatten(0, 1)
    for rollout, row in zip(rollouts, expected, strict=True):
        torch.testing.assert_close(torch.tensor(rollout.logprobs), row[: len(rollout.logprobs)], atol=1e-4, rtol=1e-4)
        assert rollout.versions == [4] * len(rollout.response_ids)


def test_samples_depend_on_neither_batch_nor_order_nor_global_state(model):
    sampling = Sampling(n=2, max_tokens=6, end_ids=(1,), seed=1)
    whole = key(HFGenerator(model, 0, batch_size=128).generate(PROMPTS, sampling))
    torch.manual_seed(99)
    state = torch.get_rng_state()
    pieces = key(HFGenerator(model, 0, batch_size=1).generate(PROMPTS[::-1], sampling))
    assert whole == pieces
    assert torch.equal(torch.get_rng_state(), state)


def test_seed_position_and_sample_each_change_the_noise(model):
    sampling = Sampling(n=2, max_tokens=12, end_ids=(), seed=1)
    generator = HFGenerator(model, 0)
    first = generator.generate([Prompt(0, 0, [40, 41])], sampling)
    assert first[0].response_ids != first[1].response_ids
    assert generator.generate([Prompt(48, 0, [40, 41])], sampling)[0].response_ids != first[0].response_ids
    other = Sampling(n=2, max_tokens=12, end_ids=(), seed=2)
    assert generator.generate([Prompt(0, 0, [40, 41])], other)[0].response_ids != first[0].response_ids
    seeds = {sampling.seed_of(position, sample) for position in range(200) for sample in range(16)}
    assert len(seeds) == 3200


def test_sampling_follows_the_distribution(model):
    """4,000 first tokens against their probabilities: a chi-square statistic far over its degrees of freedom would tell."""
    sampling = Sampling(n=4000, max_tokens=1, end_ids=(), temperature=1.0, seed=3)
    rollouts = HFGenerator(model, 0, batch_size=1000).generate([Prompt(0, 0, [40, 41, 42])], sampling)
    with torch.no_grad():
        expected = model(torch.tensor([[40, 41, 42]])).logits[0, -1].softmax(-1) * 4000
    counts = torch.bincount(torch.tensor([r.response_ids[0] for r in rollouts]), minlength=len(expected))
    frequent = expected > 5
    chi_square = ((counts - expected).square() / expected)[frequent].sum()
    freedom = int(frequent.sum()) - 1
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


def test_any_of_several_end_ids_ends_a_response(model):
    free = HFGenerator(model, 0).generate(PROMPTS, Sampling(n=1, max_tokens=10, end_ids=(), seed=1))
    ends = (free[0].response_ids[2], free[1].response_ids[4])
    for rollout in HFGenerator(model, 0).generate(PROMPTS, Sampling(n=1, max_tokens=10, end_ids=ends, seed=1)):
        body, last = rollout.response_ids[:-1], rollout.response_ids[-1]
        assert not set(body) & set(ends)
        assert (rollout.finish_reason == "stop") == (last in ends)


def test_an_end_id_inside_the_prompt_ends_nothing(model):
    sampling = Sampling(n=1, max_tokens=3, end_ids=(1,), seed=1)
    rollout = HFGenerator(model, 1).generate([Prompt(0, 0, [40, 1, 41])], sampling)[0]
    assert rollout.prompt_ids == [40, 1, 41]
    assert rollout.finish_reason == ("stop" if rollout.response_ids[-1] == 1 else "length")


def test_temperature_0_is_greedy(model):
    sampling = Sampling(n=2, max_tokens=5, end_ids=(), temperature=0.0, seed=1)
    a, b = HFGenerator(model, 0).generate(PROMPTS[:1], sampling)
    ids = list(PROMPTS[0].ids)
    for _ in range(5):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert a.response_ids == b.response_ids == ids[5:]


def test_own_copy_follows_snapshots_and_not_the_training_model(model):
    generator = HFGenerator(copy.deepcopy(model), 0)
    store = WeightStore(keep=2)
    training = copy.deepcopy(model)
    before = generator.score([40, 41, 42])
    with torch.no_grad():
        for parameter in training.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    assert generator.score([40, 41, 42]) == before
    generator.load_weights(store.publish(1, 1, whole_weights(training)))
    assert generator.version == 1
    assert generator.score([40, 41, 42]) == HFGenerator(training, 0).score([40, 41, 42]) != before
    store.close()


def test_interrupt_ends_a_generation(model):
    generator = HFGenerator(model, 0)
    generator.interrupt()
    with pytest.raises(InterruptedError):
        generator.generate(PROMPTS, Sampling(n=1, max_tokens=50, end_ids=()))


def test_recorded_rollouts_replay(tmp_path):
    sampling = Sampling(n=2, max_tokens=5, end_ids=(1,), seed=1)
    recorded = FakeGenerator(vocab_size=50).generate(PROMPTS, sampling)
    write_rollouts(tmp_path / "rollouts.jsonl", recorded, update=0)
    assert read_rollouts(tmp_path / "rollouts.jsonl") == recorded
    assert ReplayGenerator(tmp_path / "rollouts.jsonl").generate(PROMPTS[::-1], sampling) == recorded[4:] + recorded[2:4] + recorded[:2]
    with pytest.raises(ValueError, match="position 70 has 0 recorded rollouts"):
        ReplayGenerator(tmp_path / "rollouts.jsonl").generate([Prompt(70, 0, [1])], sampling)
