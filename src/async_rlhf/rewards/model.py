"""A reward model: a scalar head on a decoder, read at its last token, or an encoder, with its own tokenizer and template."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from peft import PeftModel
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from async_rlhf import adapters, distributed
from async_rlhf.config import ModelConfig, UserError, require, setting
from async_rlhf.models import check_model_path
from async_rlhf.rewards.base import RewardContext, RewardSettings, Sample
from async_rlhf.rewards.heads import ENCODERS, Head, RewardForward, find_head, load_classifier, loading_under
from async_rlhf.rewards.sharded import Meeting, Shards
from async_rlhf.rewards.template import Template, check_template, columns_of
from async_rlhf.vocabulary import same_vocabulary


@dataclass
class ModelSettings(RewardSettings):
    """A reward model, whole on every rank or sharded over them."""

    model: str = setting("", "A folder or hub name of a sequence classifier with one output, or of a language model with a scalar head.")
    head: str | None = setting(None, "Name of its head's weights in the file. Default: score, v_head.summary, value_head, regression_head.")
    template: str | None = setting(
        None, "What it reads: a format string with {prompt}, {response} and columns. Default: the prompt and after it the response."
    )
    chat_template: bool = setting(False, "It reads the chat template of its own tokenizer: prompt, then response as the assistant's turn.")
    prompt_column: str | None = setting(
        None, "`chat_template`: column of the prompt, text or a conversation. Default: the prompt, if it has no marks of another template."
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = setting(None, "Type of its weights. Default: `torch_dtype`.")
    device: str | None = setting(None, "Where it computes. Default: the training device.")
    batch_size: int | None = setting(None, "Samples that it scores at a time. Default: `reward_batch_size`.")
    max_length: int | None = setting(None, "Tokens that it reads at most; the prompt is cut from the left. Default: its context.")
    sharding: Literal["none", "zero3", "fsdp"] = setting(
        "none", "none: whole on every rank; zero3: its weights are spread over the ranks by DeepSpeed; fsdp: by torch."
    )
    offload: bool = setting(False, "`zero3`: keep its share of the weights in the CPU's memory.")
    timeout: float = setting(600.0, "Sharded: seconds that a rank waits for the others to come and score with it.")

    def __post_init__(self):
        require(not (self.template and self.chat_template), "template and chat_template exclude each other")
        require(self.chat_template or not self.prompt_column, "prompt_column belongs to chat_template; a template names its columns itself")
        require(self.sharding == "zero3" or not self.offload, f"offload belongs to sharding zero3, not {self.sharding}")
        require(self.sharding == "none" or not self.device, f"device {self.device!r}: a sharded model computes on the training devices")
        require(self.timeout > 0, f"timeout {self.timeout}: above 0")

    def default_name(self) -> str:
        return Path(self.model).name

    def check(self) -> None:
        check_model_path(self.model, "model", adapters=True)
        if self.template:
            check_template(self.template)
        self._check_processes(distributed.launched_processes())

    @property
    def collective(self) -> bool:
        return self.sharding != "none"

    @property
    def columns(self) -> set[str]:
        return columns_of(self.template, self.prompt_column)

    def adapts(self, policy: ModelConfig) -> bool:
        return adapters.shares_base(self.model, policy)

    def open(self, context: RewardContext) -> "RewardModel":
        settings = dict(
            path=str(Path(self.model).expanduser()) if Path(self.model).exists() else self.model,
            device=self.device or context.device,
            policy_tokenizer=context.policy_tokenizer,
            dtype=getattr(torch, self.dtype) if self.dtype else context.dtype,
            batch_size=self.batch_size or context.batch_size,
            max_length=self.max_length,
            trust_remote_code=context.trust_remote_code,
            head=self.head,
            template=self.template,
            chat_template=self.chat_template,
            prompt_column=self.prompt_column,
        )
        self._check_processes(distributed.world_size())
        sharded = self.sharding != "none"
        shards = Shards(self.sharding, Meeting(self.name or self.default_name(), self.timeout), self.offload) if sharded else None
        trunk = context.trunk if context.policy and self.adapts(context.policy) else None
        return RewardModel(**settings, shards=shards, trunk=trunk)

    def _check_processes(self, processes: int) -> None:
        enough = self.sharding == "none" or processes > 1
        require(enough, f"sharding {self.sharding} spreads a model over training processes, and there is one: leave it out")


class RewardModel:
    """Scores samples in batches of `batch_size`, at most `max_length` tokens each: the prompt is cut from the left, never the response.

    The policy's token ids are scored as they are when `policy_tokenizer` is provably the same vocabulary and there is no template, and
    the text is tokenized anew otherwise. A decoder's score is read at the true last token, whatever the padding and whatever the pad id.
    With `shards` every rank holds a part of the weights, and all ranks call it together. `path` may hold a LoRA adapter: it comes with its
    base, merged, or goes beside the adapters of `trunk`, a model of the same base.

    Raises:
        UserError: nothing loadable at `path`, no head of one output there, or a template that its tokenizer cannot fill.
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
        head: str | None = None,
        template: str | None = None,
        chat_template: bool = False,
        prompt_column: str | None = None,
        shards: Shards | None = None,
        trunk: PeftModel | None = None,
    ):
        self.path, self.device, self.dtype, self.trust_remote_code = path, torch.device(device), dtype, trust_remote_code
        self.batch_size, self.shards, self.collective, self.trunk = batch_size, shards, shards is not None, trunk
        self.adapter = adapters.adapter_config(path)
        require(not (self.adapter and shards), f"reward model {path!r} is a LoRA adapter, and sharding takes whole models: merge it")
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, truncation_side="left")
            if self.adapter:
                self.config = adapters.base_config(self.adapter, trust_remote_code)
            else:
                self.config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
            self.is_encoder = self.config.model_type in ENCODERS
            marks = set(policy_tokenizer.all_special_tokens) if policy_tokenizer else set()
            self.template = Template(self.tokenizer, template, prompt_column, marks) if template or chat_template else None
            self.head = Head() if self.adapter else find_head(path, self.config, head)
            self.scorer = self._load()
        except (OSError, ValueError, RuntimeError) as error:
            if (isinstance(error, UserError) and not self.adapter) or (isinstance(error, RuntimeError) and shards):
                raise  # a rank that fails while others load is no wrong path
            raise UserError(f"no reward model at {path!r}: {' '.join(str(error).split())[:300]}") from error
        self.max_length = max_length or min(self.tokenizer.model_max_length, self.config.max_position_embeddings)
        same = policy_tokenizer is not None and same_vocabulary(policy_tokenizer, self.tokenizer)
        self.reuses_ids = same and not self.is_encoder and self.template is None

    @property
    def starts_values(self) -> bool:
        """Whether a value model of the policy can start from its file: the same tokens, and a head that `transformers` finds by itself."""
        return self.reuses_ids and self.head == Head()

    @property
    def model(self) -> nn.Module:
        """The classifier, of `transformers`."""
        return getattr(self.scorer, "module", self.scorer).model  # an engine of DeepSpeed has it in `module`

    def _load(self) -> nn.Module:
        """The forward, on its device, or this rank's share of it."""
        if self.shards:
            return self.shards.spread(self._scorer, self.config, self.dtype, self.device, self.trust_remote_code)
        with loading_under(None):
            return self._scorer().to(self.device)

    def _scorer(self, **settings) -> RewardForward:
        settings |= dict(dtype=self.dtype, trust_remote_code=self.trust_remote_code)
        if self.trunk:
            name = f"{adapters.REWARD}-{len(self.trunk.peft_config)}"
            model = adapters.TrunkClassifier(self.trunk, name, self.path, train=False, remote=self.trust_remote_code)
        elif self.adapter:
            model, _ = adapters.load_classifier(self.path, **settings)
        else:
            model = load_classifier(self.path, self.config, self.head, **settings)
        return RewardForward(model, self.head, self.is_encoder).eval()

    @torch.no_grad()
    def __call__(self, samples: Sequence[Sample]) -> torch.Tensor:
        ids = [self.encode(sample) for sample in samples]
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        chunks = [order[start : start + self.batch_size] for start in range(0, len(ids), self.batch_size)]
        idle = max(self.shards.meeting.hold(len(chunks))) - len(chunks) if self.shards else 0  # forwards of other ranks alone
        scores = torch.empty(len(ids))
        for chunk in chunks:
            scores[chunk] = self.forward([ids[i] for i in chunk]).float().cpu()
        for _ in range(idle):
            self.forward([[0]])
        return scores

    def close(self) -> None:
        if self.shards:
            self.shards.meeting.close()

    def encode(self, sample: Sample) -> list[int]:
        """The token ids that are scored: prompt, response and, for a decoder, the end of sequence if the response has one."""
        if self.template and self.is_encoder:
            text, _ = self.template.text_of(sample)
            return self.tokenizer(text, truncation=True, max_length=self.max_length)["input_ids"]
        if self.template:
            ids, before = self.template(sample)
            return join_ids(ids[:before], ids[before:], self.max_length)
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
        pad = 0 if self.trunk else self.tokenizer.pad_token_id or 0  # masked; a trunk may not know the id
        tokens = torch.tensor([row + [pad] * (width - len(row)) for row in ids])
        return self.scorer(tokens.to(self.device), lengths.to(self.device))


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
