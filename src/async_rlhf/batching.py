"""Forwards of rows of like length, within a budget of tokens, so that little of a forward is padding."""

import torch

from async_rlhf.algorithm import Tensors


def micro_batches(rows: Tensors, prompts_per_forward: int) -> list[torch.Tensor]:
    """Indices of the rows of each forward, the longest rows first.

    The budget is what `prompts_per_forward` rows as long as the longest one take, padded: a forward of short rows holds more of
    them, and needs no more memory. A row is a prompt `[P]` with its responses `[k, R]`, as `pad_tokens` makes it. Rows that fit one
    forward stay in their order.
    """
    prompts, responses = rows["prompt_length"], rows["response_length"].amax(1)
    k, count = rows["response_length"].shape[1], len(prompts)
    budget = prompts_per_forward * int(prompts.max() + k * responses.max())
    if count * int(prompts.max() + k * responses.max()) <= budget:
        return [torch.arange(count)]
    chunks: list[list[int]] = []
    widest = longest = 0
    for i in torch.argsort(prompts + k * responses, descending=True, stable=True).tolist():
        wider, longer = max(widest, int(prompts[i])), max(longest, int(responses[i]))
        if chunks and (len(chunks[-1]) + 1) * (wider + k * longer) <= budget:
            chunks[-1].append(i)
            widest, longest = wider, longer
        else:
            chunks.append([i])
            widest, longest = int(prompts[i]), int(responses[i])
    return [torch.tensor(chunk) for chunk in chunks]


def select(rows: Tensors, indices: torch.Tensor) -> Tensors:
    return {name: tensor[indices.to(tensor.device)] for name, tensor in rows.items()}
