"""Rewards and a reference policy over HTTP: the other side of `rewards/remote.py` and `remote_reference.py`.

    POST /get_reward  {"query", "prompts", "labels", …}                     ->  {"rewards", "scores", "extra_logs"}
    POST /logprobs    {"id", "prompts", "responses", "temperature"}         ->  {"logprobs"}
    GET  /health                                                            ->  what is served, its vocabulary, its limits

One request computes at a time. An error is `{"error": message}` with its status.
"""

import asyncio
import hmac
import logging
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, ValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from transformers import PreTrainedTokenizerBase

from async_rlhf.models import Policy, pad_tokens
from async_rlhf.reference import LocalReference
from async_rlhf.rewards import RewardSet, Sample
from async_rlhf.vocabulary import describe_vocabulary

BODY_SECONDS = 60.0  # for a client to send its request

logger = logging.getLogger(__name__)


class ScoreRequest(BaseModel):
    """Samples, as lists of one length. `query` alone will do; a response is else what follows the prompt in it."""

    query: list[str] | None = None
    prompts: list[str] | None = None
    labels: list[Any] | None = None
    responses: list[str] | None = None
    finished: list[bool] | None = None
    groups: list[int] | None = None
    columns: list[dict[str, Any]] | None = None
    prompt_ids: list[list[int]] | None = None
    response_ids: list[list[int]] | None = None
    vocabulary: str | None = None

    def __len__(self) -> int:
        return len(self.query or self.responses or [])

    def samples(self, eos: str | None) -> list[Sample]:
        """
        Raises:
            HTTPException: 422, lists of different lengths, or neither query nor responses.
        """
        lists = {name: value for name, value in self if isinstance(value, list)}
        if not len(self) or {len(value) for value in lists.values()} != {len(self)}:
            lengths = ", ".join(f"{name} {len(value)}" for name, value in lists.items())
            raise HTTPException(422, f"lists of one length are needed, query or responses among them; got {lengths or 'none'}")
        prompts = self.prompts or [""] * len(self)
        numbers = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
        return [
            Sample(
                prompt=prompt if self.responses or self.query[i].startswith(prompt) else "",
                response=self.responses[i] if self.responses else _after(self.query[i], prompt, eos),
                prompt_ids=self.prompt_ids[i] if self.prompt_ids else [],
                response_ids=self.response_ids[i] if self.response_ids else [],
                finished=self.finished[i] if self.finished else True,
                columns=self.columns[i] if self.columns else {},
                group=self.groups[i] if self.groups else numbers[prompt],
                reference=(self.labels[i] if self.labels and isinstance(self.labels[i], str) else None) or None,
            )
            for i, prompt in enumerate(prompts)
        ]


class LogprobsRequest(BaseModel):
    """Token ids of p prompts with k responses each, and whose log-probabilities at which temperature are wanted."""

    id: str
    prompts: list[list[int]] = Field(min_length=1)
    responses: list[list[list[int]]]
    temperature: float = Field(gt=0, allow_inf_nan=False)

    def check(self, vocabulary: int, context: int | None) -> None:
        """
        Raises:
            HTTPException: 422, not as many responses for each prompt, an empty prompt, no token's id, or a sequence over the context.
        """
        counts = {len(group) for group in self.responses}
        if len(self.responses) != len(self.prompts) or len(counts) != 1 or 0 in counts:
            raise HTTPException(422, "as many responses, one at least, are needed for each prompt")
        for prompt, group in zip(self.prompts, self.responses, strict=True):
            longest = len(prompt) + max(map(len, group))
            if not prompt or (context is not None and longest > context):
                raise HTTPException(422, f"a prompt of {len(prompt)} tokens, {longest} with its response; 1 to {context} are possible")
            if not all(0 <= token < vocabulary for ids in (prompt, *group) for token in ids):
                raise HTTPException(422, f"a token id that is not below {vocabulary}")


@dataclass(frozen=True)
class ServedReference:
    """A reference policy, `batch_size` completions at a time. `id` changes with its weights, its type and its vocabulary."""

    policy: Policy
    batch_size: int
    id: str
    model: str
    dtype: str
    context: int | None

    def describe(self) -> dict[str, Any]:
        return {"model": self.model, "dtype": self.dtype, "context": self.context, "id": self.id}

    def logprobs(self, request: LogprobsRequest) -> list[list[list[float]]]:
        """As `responses` is shaped."""
        tokens = pad_tokens(request.prompts, request.responses, 0)
        tokens = {name: tensor.to(self.policy.model.device) for name, tensor in tokens.items()}
        prompts_per_forward = max(1, self.batch_size // len(request.responses[0]))
        values = LocalReference(self.policy, prompts_per_forward)(tokens, request.temperature)
        if not torch.isfinite(values).all():
            raise ValueError(f"the reference {self.model} gives log-probabilities that are not finite")
        rows = zip(values.tolist(), request.responses, strict=True)
        return [[row[: len(ids)] for row, ids in zip(group, wanted, strict=True)] for group, wanted in rows]


class Worker:
    """Computes one thing at a time, in a thread, in the order of the requests."""

    def __init__(self):
        self._thread, self._turn = ThreadPoolExecutor(1, "compute"), asyncio.Lock()
        self.busy = False

    async def run(self, request: Request, function: Callable[..., Any], *arguments) -> Any:
        """What the function gives, unless the client has gone before it is its turn.

        Raises:
            HTTPException: 500, whatever the function raises, with its message; 503, the server stops first.
        """
        async with self._turn:
            if await request.is_disconnected():
                raise HTTPException(499, "the client has gone")
            try:
                return await asyncio.get_running_loop().run_in_executor(self._thread, self._compute, function, *arguments)
            except asyncio.CancelledError as error:
                raise HTTPException(503, "the server is stopping") from error

    def _compute(self, function: Callable[..., Any], *arguments) -> Any:
        self.busy = True
        try:
            return function(*arguments)
        except Exception as error:
            logger.error("%s", traceback.format_exc())
            raise HTTPException(500, " ".join(f"{type(error).__name__}: {error}".split())) from error
        finally:
            self.busy = False


class RewardServer:
    """Answers for `rewards` and `reference`, either of which may be None, to those who have the `key`, if there is one.

    `tokenizer` is that of the policy whose token ids are sent. Requests of more than `max_batch` samples or `max_bytes` are refused.
    """

    def __init__(
        self,
        rewards: RewardSet | None,
        reference: ServedReference | None,
        tokenizer: PreTrainedTokenizerBase | None,
        max_batch: int,
        max_bytes: int,
        key: str | None = None,
    ):
        self.rewards, self.reference, self.max_batch, self.max_bytes, self.key = rewards, reference, max_batch, max_bytes, key
        self.eos = tokenizer.eos_token if tokenizer is not None else None
        self.vocabulary = describe_vocabulary(tokenizer) if tokenizer is not None else None
        if self.vocabulary:
            self.vocabulary["name"] = tokenizer.name_or_path
        self.worker = Worker()
        self.app = FastAPI(
            title="async-rlhf rewards", docs_url=None, redoc_url=None, openapi_url=None, dependencies=[Depends(self.authorize)]
        )
        self.app.add_exception_handler(StarletteHTTPException, answer_error)
        self.app.add_exception_handler(Exception, answer_failure)
        self.app.get("/health")(self.health)
        for path in ("/get_reward", "/"):
            self.app.post(path)(self.get_reward)
        self.app.post("/logprobs")(self.get_logprobs)

    async def authorize(self, request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if self.key and not hmac.compare_digest(given, f"Bearer {self.key}".encode()):
            raise HTTPException(401, "an API key is needed, as Authorization: Bearer, and this is not it", {"WWW-Authenticate": "Bearer"})

    async def health(self) -> dict[str, Any]:
        return {
            "status": "ok",
            "rewards": [part.name for part in self.rewards.parts] if self.rewards else [],
            "reference": self.reference.describe() if self.reference else None,
            "vocabulary": self.vocabulary,
            "max_batch": self.max_batch,
            "max_bytes": self.max_bytes,
        }

    async def get_reward(self, request: Request) -> JSONResponse:
        body = await self._read(request, ScoreRequest)
        if not self.rewards:
            raise HTTPException(404, "no reward is served here")
        if body.vocabulary is not None and (self.vocabulary is None or body.vocabulary != self.vocabulary["hash"]):
            raise HTTPException(409, f"the token ids are of vocabulary {body.vocabulary}, this server's is {self._vocabulary_name()}")
        if body.vocabulary is None:  # ids that nobody vouches for could mean anything
            body.prompt_ids = body.response_ids = None
        samples = body.samples(self.eos)
        self._check_size(len(samples))
        scores = await self.worker.run(request, self.rewards.score, samples)
        total = scores.total.tolist()
        return JSONResponse(
            {"rewards": total, "scores": total, "extra_logs": {name: part.tolist() for name, part in scores.by_name.items()}}
        )

    async def get_logprobs(self, request: Request) -> JSONResponse:
        body = await self._read(request, LogprobsRequest)
        reference = self.reference
        if not reference:
            raise HTTPException(404, "no reference is served here: start the server with reference_model_path")
        if body.id != reference.id:
            raise HTTPException(409, f"reference {body.id} is asked for, and {reference.id} ({reference.model}) is served: it has changed")
        body.check(reference.policy.vocabulary, reference.context)
        self._check_size(sum(map(len, body.responses)))
        return JSONResponse({"logprobs": await self.worker.run(request, reference.logprobs, body)})

    def _vocabulary_name(self) -> str:
        return f"{self.vocabulary['hash']} ({self.vocabulary['name']})" if self.vocabulary else "not known (model_name_or_path)"

    def _check_size(self, samples: int) -> None:
        if samples > self.max_batch:
            raise HTTPException(413, f"{samples} samples in a request; at most {self.max_batch} (max_batch) are taken: lower batch_size")

    async def _read(self, request: Request, form: type[BaseModel]) -> Any:
        """The body of the request.

        Raises:
            HTTPException: 413, too large; 408, too slow; 422, not of that form.
        """
        chunks, size = [], 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > self.max_bytes:
                        raise HTTPException(413, f"a request over {self.max_bytes} bytes (max_request_mib): lower batch_size")
                    chunks.append(chunk)
        except TimeoutError as error:
            raise HTTPException(408, f"no whole request within {BODY_SECONDS:g} s") from error
        try:
            return form.model_validate_json(b"".join(chunks))
        except ValidationError as error:
            faults = "; ".join(f"{'.'.join(map(str, fault['loc']))} {fault['msg']}".strip() for fault in error.errors()[:3])
            raise HTTPException(422, f"no request of the form that is documented: {faults}") from error


async def answer_error(request: Request, error: StarletteHTTPException) -> JSONResponse:
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


async def answer_failure(request: Request, error: Exception) -> JSONResponse:
    """What should not happen; the server's log has the traceback."""
    return JSONResponse({"error": f"{type(error).__name__} in the server"}, 500)


def _after(query: str, prompt: str, eos: str | None) -> str:
    """The response in a query, without the text of the end of sequence."""
    response = query.removeprefix(prompt)
    return response.removesuffix(eos) if eos else response


def served_names(rewards: Sequence[str], reference: str | None) -> str:
    """What a server offers, for people."""
    parts = [f"reward{'s' * (len(rewards) > 1)} {', '.join(rewards)}"] * bool(rewards) + [f"reference {reference}"] * bool(reference)
    return " and ".join(parts)
