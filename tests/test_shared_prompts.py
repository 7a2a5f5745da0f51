"""The shared path against the plain one, on left-padded prompts of different lengths: log-probabilities and gradients."""

import pytest
import torch
from conftest import GPT2, LLAMA, NEOX

from async_rlhf.models import Policy, length_mask, pad_tokens, scratch_causal_lm, train_tokenizer

PROMPT_LENGTHS, LONGEST, TOLERANCE = (19, 7, 1, 12), 9, 1e-5


@pytest.fixture(scope="module", params=[NEOX, GPT2, LLAMA], ids=lambda settings: settings["model_type"])
def model(request):
    tokenizer = train_tokenizer(["a b c"], vocab_size=260, max_length=64)
    return scratch_causal_lm(request.param, tokenizer, seed=5).eval()


def groups(k: int) -> dict[str, torch.Tensor]:
    """Prompts with k responses each, of 1 to LONGEST tokens."""
    draw = torch.Generator().manual_seed(k)

    def ids(length: int) -> list[int]:
        return torch.randint(2, 260, (length,), generator=draw).tolist()

    responses = [[ids(1 + (4 * i + 3 * j) % LONGEST) for j in range(k)] for i in range(len(PROMPT_LENGTHS))]
    return pad_tokens([ids(length) for length in PROMPT_LENGTHS], responses, 0)


def logprobs_and_gradient(model, tokens: dict[str, torch.Tensor], share_prompts: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the responses' tokens; of a sum in which each response has a weight of its own."""
    mask = length_mask(tokens["response_length"], tokens["response_ids"].shape[-1])
    model.zero_grad()
    logprobs = torch.where(mask, Policy(model, share_prompts)(**tokens, temperature=0.7), 0.0)
    weights = torch.randn(mask.shape[:2], generator=torch.Generator().manual_seed(1))
    (logprobs.sum(-1) * weights).sum().backward()
    return logprobs.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("k", [2, 4])
def test_shared_and_plain_paths_agree(model, k):
    tokens = groups(k)
    (shared, shared_gradient), (plain, plain_gradient) = (logprobs_and_gradient(model, tokens, share) for share in (True, False))
    torch.testing.assert_close(shared, plain, atol=TOLERANCE, rtol=0)
    assert plain.abs().max() > 1 and plain_gradient.norm() > 1
    assert (shared_gradient - plain_gradient).norm() <= TOLERANCE * plain_gradient.norm()


def test_the_shared_path_runs_each_prompt_once(model):
    """What the two were compared for: k times fewer prompt tokens through the model."""
    k, tokens, counts = 4, groups(4), {}
    for share in (True, False):
        seen = []
        hook = model.get_input_embeddings().register_forward_hook(lambda module, inputs, output, seen=seen: seen.append(inputs[0].numel()))
        with torch.no_grad():
            Policy(model, share)(**tokens)
        hook.remove()
        counts[share] = sum(seen)
    n, width = tokens["prompt_ids"].shape
    longest = int(tokens["response_length"].max())
    assert counts == {True: n * (width + k * (longest - 1)), False: n * k * (width + longest)}
