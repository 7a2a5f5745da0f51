"""A reference policy on servers, `serve_reward_model.py` or vLLM's: its log-probabilities over HTTP.

Token ids go there, so its vocabulary must be the policy's. That is found out before a model is loaded here, and a run that differs is
refused. `serve_reward_model.py` describes its vocabulary; vLLM's is read off what it makes of every token and of a long text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from async_rlhf.algorithm import Tensors
from async_rlhf.config import RLConfig, UserError, from_mapping, require, setting
from async_rlhf.rewards.remote import is_finite_number, refuse_other_vocabulary
from async_rlhf.rewards.servers import SHOWN, RequestSettings, Servers
from async_rlhf.vocabulary import describe_vocabulary

IMPOSSIBLE = -9999.0  # vLLM's log-probability of what cannot be


@dataclass
class ReferenceSettings(RequestSettings):
    """How the servers of a reference policy are asked."""

    batch_size: int = setting(64, "Completions a request; those of one prompt stay together.")

    def __post_init__(self):
        super().__post_init__()
        require(self.batch_size >= 1, f"batch_size {self.batch_size}: at least 1")


def check_remote_reference(config: RLConfig) -> ReferenceSettings:
    """The settings of the servers, if there are any. Asks none.

    Raises:
        UserError: an unknown setting, what is no URL, no API key.
    """
    settings = from_mapping(ReferenceSettings, config.reference_request, "reference_request")
    try:
        settings.check_servers(config.reference_url)
    except UserError as error:
        raise UserError(f"reference_url: {error}") from error
    return settings


def open_remote_reference(config: RLConfig, tokenizer: PreTrainedTokenizerBase, longest: int) -> "RemoteReference | None":
    """The reference on servers, or None without `reference_url`. `longest` is a sequence's most tokens.

    Raises:
        UserError: no server there, another vocabulary, another reference on one server than on the other, or a context that is too short.
    """
    settings = check_remote_reference(config)
    if not config.reference_url:
        return None
    kind = VLLMReference if config.reference_server == "vllm" else ServedReference
    try:
        return kind(config.reference_url, settings, tokenizer, longest)
    except UserError as error:
        message = str(error)
        raise UserError(message if message.startswith("reference_url") else f"reference_url: {message}") from error


class RemoteReference:
    """A `Reference` on servers that answer alike. A kind says how they are asked, and how they are met first."""

    endpoint: str
    path: str | None

    def __init__(self, urls: Sequence[str], settings: ReferenceSettings, tokenizer: PreTrainedTokenizerBase, longest: int):
        self.settings, self.servers = settings, Servers(urls, settings)
        self.meet(tokenizer, longest)

    def meet(self, tokenizer: PreTrainedTokenizerBase, longest: int) -> None:
        raise NotImplementedError

    def body(self, prompts: list[list[int]], responses: list[list[list[int]]], temperature: float) -> dict[str, Any]:
        """What is sent of some prompts with k responses each."""
        raise NotImplementedError

    def read(self, answer: Any, prompts: list[list[int]], responses: list[list[list[int]]]) -> list[list[list[float]]]:
        """The log-probabilities in an answer, as `responses` is shaped; a `ValueError` if they are not there."""
        raise NotImplementedError

    def __call__(self, tokens: Tensors, temperature: float) -> torch.Tensor:
        """
        Raises:
            UserError: no server answers, or one does wrongly; it names the URL.
        """
        prompts, responses = unpad_tokens(tokens)
        shape = tokens["response_ids"].shape
        size = max(1, self.settings.batch_size // shape[1])
        chunks = [(prompts[i : i + size], responses[i : i + size]) for i in range(0, len(prompts), size)]
        bodies = [self.body(*chunk, temperature) for chunk in chunks]
        answers = self.servers.post(self.endpoint, bodies, lambda answer, i: self.read(answer, *chunks[i]))
        rows = [[row + [0.0] * (shape[-1] - len(row)) for row in group] for answer in answers for group in answer]
        return torch.tensor(rows, device=tokens["response_ids"].device)


class ServedReference(RemoteReference):
    """`serve_reward_model.py` with a `reference_model_path`."""

    endpoint = "/logprobs"

    def meet(self, tokenizer: PreTrainedTokenizerBase, longest: int) -> None:
        own, references = describe_vocabulary(tokenizer), []
        for url, health in zip(self.servers.urls, self.servers.get("/health"), strict=True):
            refuse_other_vocabulary("reference_url", url, health, own, tokenizer.name_or_path)
            reference = health.get("reference")
            require(reference, f"reference_url: {url} serves no reference: start it with reference_model_path")
            check_context(url, reference.get("context"), longest)
            references.append(reference)
        first = references[0]
        for url, reference in zip(self.servers.urls, references, strict=True):
            same = reference.get("id") == first.get("id")
            require(same, f"reference_url: {self.servers.urls[0]} and {url} serve different references: {first} and {reference}")
        self.id, self.path = first["id"], first["model"]

    def body(self, prompts, responses, temperature):
        return {"id": self.id, "prompts": prompts, "responses": responses, "temperature": temperature}

    def read(self, answer, prompts, responses):
        groups = answer.get("logprobs") if isinstance(answer, dict) else None
        try:
            fits = all(
                len(row) == len(ids) and all(map(is_finite_number, row))
                for group, wanted in zip(groups, responses, strict=True)
                for row, ids in zip(group, wanted, strict=True)
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"no log-probabilities for {len(responses)} prompts in the answer: {answer!r:.{SHOWN}}") from error
        if not fits:
            raise ValueError(f"not one finite log-probability a token in the answer: {answer!r:.{SHOWN}}")
        return groups


class VLLMReference(RemoteReference):
    """vLLM's OpenAI-compatible server, its URL ending in /v1. Its `prompt_logprobs` are those of temperature 1, whatever is asked."""

    endpoint = "/completions"

    def meet(self, tokenizer: PreTrainedTokenizerBase, longest: int) -> None:
        models = []
        for url, answer in zip(self.servers.urls, self.servers.get("/models"), strict=True):
            try:
                model = next(model for model in answer["data"] if not model.get("parent"))  # adapters have one
                models.append((model["id"], model.get("root")))
            except (KeyError, TypeError, StopIteration) as error:
                raise UserError(f"{url}: /models names no model: {answer!r:.{SHOWN}}") from error
            check_context(url, model.get("max_model_len"), longest + 1)  # it samples a token, which nobody reads
            self._compare_vocabulary(url, model["id"], tokenizer)
        require(len(set(models)) == 1, f"{', '.join(self.servers.urls)}: different models there: {models}")
        self.model, self.path = models[0]

    def _compare_vocabulary(self, url: str, model: str, tokenizer: PreTrainedTokenizerBase) -> None:
        """By what the server makes of every token, and then of the text of them all."""
        server = Servers([url.rstrip("/").removesuffix("/v1")], self.settings)
        own = describe_vocabulary(tokenizer)
        require(own is not None, f"{tokenizer.name_or_path} has no fast tokenizer: its vocabulary cannot be compared with that at {url}")
        ids = [i for i in range(len(tokenizer)) if i != own["pad"] or str(i) not in own["added"]]  # only the policy may have that one
        text = tokenizer.decode(ids)
        differs = (
            f"{{}} at {url} ({model}) is not that of the policy ({tokenizer.name_or_path}, {own['hash']}): token ids mean others there"
        )
        (answer,) = server.post("/detokenize", [{"model": model, "tokens": ids}])
        require(answer == {"prompt": text}, differs.format("the text of the tokens"))
        (answer,) = server.post("/tokenize", [{"model": model, "prompt": text, "add_special_tokens": False}])
        ours = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        require(isinstance(answer, dict) and answer.get("tokens") == ours, differs.format("the tokenization"))

    def body(self, prompts, responses, temperature):
        require(temperature == 1, f"reference_server vllm: its log-probabilities are those of temperature 1, not {temperature}")
        sequences = [prompt + response for prompt, group in zip(prompts, responses, strict=True) for response in group]
        return {"model": self.model, "prompt": sequences, "max_tokens": 1, "prompt_logprobs": 0, "temperature": 0.0}

    def read(self, answer, prompts, responses):
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            rows = iter([choice["prompt_logprobs"] for choice in choices])
            found = [
                [response_logprobs(next(rows), len(prompt), response) for response in group]
                for prompt, group in zip(prompts, responses, strict=True)
            ]
        except (KeyError, TypeError, IndexError, StopIteration) as error:
            raise ValueError(f"not one list of prompt_logprobs a sequence in the answer: {answer!r:.{SHOWN}}") from error
        return found


def response_logprobs(logprobs: list[dict | None], start: int, response: list[int]) -> list[float]:
    """Those of the tokens of a response that begins at `start`, out of vLLM's `prompt_logprobs` of the whole sequence.

    Raises:
        ValueError: there are fewer or more, or one is impossible.
        KeyError: they are those of other tokens.
    """
    if len(logprobs) != start + len(response):
        raise ValueError(f"{len(logprobs)} prompt_logprobs for {start + len(response)} tokens")
    values = [logprobs[start + i][str(token)]["logprob"] for i, token in enumerate(response)]
    if not all(is_finite_number(value) and value > IMPOSSIBLE for value in values):
        raise ValueError(f"a response with the log-probabilities {values}: finite ones are needed")
    return values


def check_context(url: str, context: int | None, longest: int) -> None:
    require(
        context is None or longest <= context,
        f"{url}: sequences of {longest} tokens are over its context {context}: lower max_prompt_length or response_length",
    )


def unpad_tokens(tokens: Tensors) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Prompts and their responses as lists, out of the tensors of `pad_tokens`."""
    width = tokens["prompt_ids"].shape[1]
    prompts = [ids[width - n :] for ids, n in zip(tokens["prompt_ids"].tolist(), tokens["prompt_length"].tolist(), strict=True)]
    lengths = tokens["response_length"].tolist()
    responses = [
        [ids[:n] for ids, n in zip(group, ns, strict=True)] for group, ns in zip(tokens["response_ids"].tolist(), lengths, strict=True)
    ]
    return prompts, responses
