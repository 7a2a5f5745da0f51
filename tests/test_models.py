"""Response log-probabilities: against one unpadded sequence at a time, for every architecture, shared and plain."""

import pytest
import torch
from conftest import GPT2, LLAMA, NEOX

from async_rlhf.models import Policy, length_mask, pad_tokens, scratch_causal_lm, train_tokenizer

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [15]]
RESPONSES = [[[20, 21, 1], [22]], [[23, 24], [25, 26, 27, 28, 1]], [[1], [29, 30]]]


@pytest.fixture(scope="module", params=[LLAMA, GPT2, NEOX], ids=lambda settings: settings["model_type"])
def model(request):
    tokenizer = train_tokenizer(["a b c"], vocab_size=260, max_length=64)
    return scratch_causal_lm(request.param, tokenizer, seed=3).eval()


def one_by_one(model, prompt, response, temperature):
    ids = torch.tensor([prompt + response])
    logprobs = (model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature).log_softmax(-1)
    return logprobs[torch.arange(len(response)), torch.tensor(response)]


@pytest.mark.parametrize("share_prompts", [True, False], ids=["shared", "plain"])
@pytest.mark.parametrize("pad_id", [0, 1], ids=["pad", "pad is eos"])
def test_logprobs_equal_those_of_single_unpadded_sequences(model, share_prompts, pad_id):
    tokens = pad_tokens(PROMPTS, RESPONSES, pad_id)
    with torch.no_grad():
        logprobs = Policy(model, share_prompts)(**tokens, temperature=0.7)
        for i, prompt in enumerate(PROMPTS):
            for j, response in enumerate(RESPONSES[i]):
                expected = one_by_one(model, prompt, response, 0.7)
                torch.testing.assert_close(logprobs[i, j, : len(response)], expected, atol=1e-5, rtol=1e-5)


def test_shared_and_plain_paths_have_the_same_gradient(model):
    tokens = pad_tokens(PROMPTS, RESPONSES, 0)
    mask = length_mask(tokens["response_length"], tokens["response_ids"].shape[-1])
    gradients = []
    for share_prompts in (True, False):
        model.zero_grad()
        logprobs = Policy(model, share_prompts)(**tokens, temperature=0.7)
        (torch.where(mask, logprobs, 0.0).sum(-1) * torch.tensor([[1.0, -2.0], [0.5, 1.0], [-1.0, 3.0]])).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert (gradients[0] - gradients[1]).norm() <= 1e-5 * gradients[1].norm()


def test_columns_that_only_pad_change_nothing(model):
    tokens = pad_tokens(PROMPTS, RESPONSES, 0)
    wider = {
        **tokens,
        "prompt_ids": torch.nn.functional.pad(tokens["prompt_ids"], (4, 0)),
        "response_ids": torch.nn.functional.pad(tokens["response_ids"], (0, 3)),
    }
    with torch.no_grad():
        narrow, wide = (Policy(model)(**t) for t in (tokens, wider))
    width = narrow.shape[-1]
    assert torch.equal(wide[..., :width], narrow)
