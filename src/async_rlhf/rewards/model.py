"""A reward model: a sequence classifier with one output, a decoder read at its last token or an encoder, with its own tokenizer."""

import json
from collections.abc import Sequence

import torch
from peft import PeftModel
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from async_rlhf.adapters import REWARD, TrunkClassifier, load_classifier
from async_rlhf.config import UserError, require
from async_rlhf.rewards.base import Sample

ENCODERS = {"bert", "roberta", "distilbert", "deberta", "deberta-v2", "electra", "albert", "mpnet", "xlm-roberta", "modernbert"}


class RewardModel:
    """Scores samples in batches of `batch_size`, at most `max_length` tokens each: the prompt is cut from the left, never the response.

    The policy's token ids are scored as they are when `policy_tokenizer` is provably the same vocabulary, and the text is
    tokenized anew otherwise. A decoder's score is read at the true last token, whatever the padding and whatever the pad id.
    `path` may hold a LoRA adapter: it comes with its base, merged, or goes beside the adapters of `trunk`, a model of the same base.
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
        trunk: PeftModel | None = None,
    ):
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, truncation_side="left")
            if trunk is None:
                self.model, _ = load_classifier(path, dtype=dtype, trust_remote_code=trust_remote_code)
            else:
                self.model = TrunkClassifier(trunk, REWARD, path, train=False, remote=trust_remote_code)
        except (OSError, ValueError, RuntimeError) as error:
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
        pad = 0 if isinstance(self.model, TrunkClassifier) else self.tokenizer.pad_token_id or 0  # masked; a trunk may not know the id
        device = self.model.device
        tokens = torch.tensor([row + [pad] * (width - len(row)) for row in ids], device=device)
        mask = (torch.arange(width) < lengths[:, None]).long().to(device)
        if self.is_encoder:
            return self.model(tokens, attention_mask=mask).logits[:, 0]
        hidden = self.model.base_model(tokens, attention_mask=mask).last_hidden_state
        last = hidden[torch.arange(len(ids), device=device), (lengths - 1).to(device)]
        return self.model.score(last.to(self.model.score.weight.dtype))[:, 0]


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


def same_vocabulary(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> bool:
    """Whether both turn any text into the same ids: equal tokenization models, and no id that means two things.

    A pad token that only one of them has does not count against it.
    """
    if not (a.is_fast and b.is_fast):
        return False
    parts_a, parts_b = (json.loads(t.backend_tokenizer.to_str()) for t in (a, b))
    if any(parts_a[key] != parts_b[key] for key in ("model", "normalizer", "pre_tokenizer")):
        return False
    vocabulary_a, vocabulary_b = a.get_vocab(), b.get_vocab()
    by_id_a, by_id_b = ({i: token for token, i in v.items()} for v in (vocabulary_a, vocabulary_b))
    shared = by_id_a.keys() & by_id_b.keys()
    extra = (by_id_a.keys() ^ by_id_b.keys()) - {a.pad_token_id, b.pad_token_id}
    return not extra and all(by_id_a[i] == by_id_b[i] for i in shared) and a.eos_token_id == b.eos_token_id
