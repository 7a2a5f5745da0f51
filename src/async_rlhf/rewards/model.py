"""A reward model: a sequence classifier with one output, a decoder read at its last token or an encoder, with its own tokenizer."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase

from async_rlhf.config import UserError, require, setting
from async_rlhf.models import check_model_path
from async_rlhf.rewards.base import RewardContext, RewardSettings, Sample
from async_rlhf.vocabulary import same_vocabulary

ENCODERS = {"bert", "roberta", "distilbert", "deberta", "deberta-v2", "electra", "albert", "mpnet", "xlm-roberta", "modernbert"}


@dataclass
class ModelSettings(RewardSettings):
    """A reward model, on every rank."""

    model: str = setting("", "A folder or hub name of a sequence classifier with one output.")
    dtype: Literal["float32", "bfloat16", "float16"] | None = setting(None, "Type of its weights. Default: `torch_dtype`.")
    device: str | None = setting(None, "Where it computes. Default: the training device.")
    batch_size: int | None = setting(None, "Samples that it scores at a time. Default: `reward_batch_size`.")
    max_length: int | None = setting(None, "Tokens that it reads at most; the prompt is cut from the left. Default: its context.")

    def default_name(self) -> str:
        return Path(self.model).name

    def check(self) -> None:
        check_model_path(self.model, "model")

    def open(self, context: RewardContext) -> "RewardModel":
        return RewardModel(
            str(Path(self.model).expanduser()) if Path(self.model).exists() else self.model,
            self.device or context.device,
            policy_tokenizer=context.policy_tokenizer,
            dtype=getattr(torch, self.dtype) if self.dtype else context.dtype,
            batch_size=self.batch_size or context.batch_size,
            max_length=self.max_length,
            trust_remote_code=context.trust_remote_code,
        )


class RewardModel:
    """Scores samples in batches of `batch_size`, at most `max_length` tokens each: the prompt is cut from the left, never the response.

    The policy's token ids are scored as they are when `policy_tokenizer` is provably the same vocabulary, and the text is
    tokenized anew otherwise. A decoder's score is read at the true last token, whatever the padding and whatever the pad id.
    """

    def __init__(
        self,
        path: str,
        device: torch.device | str = "cpu",
        policy_tokenizer: PreTrainedTokenizerBase | None = None,
        dtype: torch.dtype = torch.float32,
        batch_size: int = 64,
        max_length: int | None = None,
        trust_remote_code: bool = False,
    ):
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, truncation_side="left")
            self.model = AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise UserError(f"no reward model at {path!r}: {' '.join(str(error).split())[:300]}") from error
        labels = self.model.config.num_labels
        require(labels == 1, f"reward model {path!r} gives {labels} scores; one is needed (num_labels: 1)")
        self.model.to(device).eval()
        self.batch_size = batch_size
        self.max_length = max_length or min(self.tokenizer.model_max_length, self.model.config.max_position_embeddings)
        self.is_encoder = self.model.config.model_type in ENCODERS
        self.reuses_ids = not self.is_encoder and policy_tokenizer is not None and same_vocabulary(policy_tokenizer, self.tokenizer)

    @torch.no_grad()
    def __call__(self, samples: Sequence[Sample]) -> torch.Tensor:
        ids = [self.encode(sample) for sample in samples]
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        scores = torch.empty(len(ids))
        for start in range(0, len(ids), self.batch_size):
            chunk = order[start : start + self.batch_size]
            scores[chunk] = self.forward([ids[i] for i in chunk]).float().cpu()
        return scores

    def encode(self, sample: Sample) -> list[int]:
        """The token ids that are scored: prompt, response and, for a decoder, the end of sequence if the response has one."""
        if self.is_encoder:
            return encode_pair(self.tokenizer, sample.prompt, sample.response, self.max_length)
        if self.reuses_ids and sample.response_ids:
            prompt, response = sample.prompt_ids, sample.response_ids
        else:
            prompt = self.tokenizer(sample.prompt)["input_ids"]
            response = self.tokenizer(sample.response, add_special_tokens=False)["input_ids"]
            eos = self.tokenizer.eos_token_id
            if sample.finished and eos is not None and response[-1:] != [eos]:  # a data set's text may end with it already
                response = [*response, eos]
        return join_ids(prompt, response, self.max_length)

    def forward(self, ids: list[list[int]]) -> torch.Tensor:
        """Scores `[len(ids)]` of right-padded sequences."""
        lengths = torch.tensor([len(row) for row in ids])
        width = int(lengths.max())
        pad = self.tokenizer.pad_token_id or 0
        device = self.model.device
        tokens = torch.tensor([row + [pad] * (width - len(row)) for row in ids], device=device)
        mask = (torch.arange(width) < lengths[:, None]).long().to(device)
        if self.is_encoder:
            return self.model(tokens, attention_mask=mask).logits[:, 0]
        hidden = self.model.base_model(tokens, attention_mask=mask).last_hidden_state
        last = hidden[torch.arange(len(ids), device=device), (lengths - 1).to(device)]
        return self.model.score(last)[:, 0]


def encode_pair(tokenizer: PreTrainedTokenizerBase, prompt: str, response: str, max_length: int) -> list[int]:
    """What an encoder reads: both texts in one sequence, the prompt cut. `tokenizer` truncates from the left. Only a response that
    alone is over `max_length` is cut too."""
    response = response.strip()
    fits = len(tokenizer(response, verbose=False)["input_ids"]) + 1 < max_length
    return tokenizer(prompt, response, truncation="only_first" if fits else "longest_first", max_length=max_length)["input_ids"]


def join_ids(prompt: list[int], response: list[int], max_length: int) -> list[int]:
    """What a decoder reads: the end of the prompt, as much as fits, and the whole response."""
    room = max(0, max_length - len(response))
    return (prompt[-room:] if room else []) + response
