"""Forwards of rows of like length, within a budget of tokens, so that little of a forward is padding."""

from typing import Any

import torch
from torch import nn

from async_rlhf.algorithm import Tensors

MAX_PADDING = 0.1


def micro_batches(rows: Tensors, prompts_per_forward: int) -> list[torch.Tensor]:
    """Indices of the rows of each forward, the longest rows first.

    The budget is what `prompts_per_forward` rows as long as the longest one take, padded, in all tokens and in those of responses, which
    have logits: a forward of short rows holds more of them, and needs no more memory. A row that would make more than a tenth of a
    forward padding, beside that within its k responses, begins the next one. A row is a prompt `[P]` with its responses `[k, R]`, as
    `pad_tokens` makes it. Up to `prompts_per_forward` rows stay together, in their order.
    """
    prompts, responses = rows["prompt_length"].tolist(), rows["response_length"].amax(1).tolist()
    k, count = rows["response_length"].shape[1], len(prompts)
    budget = prompts_per_forward * (max(prompts) + k * max(responses))
    if count <= prompts_per_forward:
        return [torch.arange(count)]
    chunks: list[list[int]] = []
    widest = longest = used = 0
    by_prompt = sum(prompts) >= k * sum(responses)  # what decides a row's length
    for i in sorted(range(count), key=lambda i: (-prompts[i], -responses[i]) if by_prompt else (-responses[i], -prompts[i])):
        tokens = prompts[i] + k * responses[i]
        padded = (len(chunks[-1]) + 1) * (max(widest, prompts[i]) + k * max(longest, responses[i])) if chunks else 0
        says = (len(chunks[-1]) + 1) * max(longest, responses[i]) if chunks else 0
        fits = padded <= budget and says <= prompts_per_forward * max(responses)
        if chunks and fits and used + tokens >= (1 - MAX_PADDING) * padded:
            chunks[-1].append(i)
            widest, longest, used = max(widest, prompts[i]), max(longest, responses[i]), used + tokens
        else:
            chunks.append([i])
            widest, longest, used = prompts[i], responses[i], tokens
    return [torch.tensor(chunk) for chunk in chunks]


def forward_rows(module: nn.Module, rows: Tensors, prompts_per_forward: int, **options) -> Any:
    """What the module gives for every row, one tensor or several, in the rows' order, in forwards of rows of like length."""
    chunks = micro_batches(rows, prompts_per_forward)
    outputs = [module(**select(rows, chunk), **options) for chunk in chunks]
    order = torch.argsort(torch.cat(chunks)).to(rows["response_ids"].device)
    if isinstance(outputs[0], torch.Tensor):
        return torch.cat(outputs)[order]
    return tuple(torch.cat(parts)[order] for parts in zip(*outputs, strict=True))


def split_to(chunks: list[torch.Tensor], count: int) -> list[torch.Tensor]:
    """As many chunks as `count`, the largest split: all ranks must go through as many forwards, or ZeRO waits for ever."""
    chunks = list(chunks)
    while len(chunks) < count:
        largest = chunks.pop(max(range(len(chunks)), key=lambda i: len(chunks[i])))
        chunks += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    return chunks


def select(rows: Tensors, indices: torch.Tensor) -> Tensors:
    return {name: tensor[indices.to(tensor.device)] for name, tensor in rows.items()}
