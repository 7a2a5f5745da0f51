"""The Generator protocol, and the generators that run in this process: Hugging Face, replay, and a fake for tests."""

import hashlib
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from safetensors.torch import load_file
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from async_rlhf.config import SamplingConfig
from async_rlhf.rollout import Prompt, Rollout, read_rollouts
from async_rlhf.weights import Snapshot


@dataclass(frozen=True)
class Sampling:
    """How to sample: `n` responses a prompt, each ended by one of `end_ids` or at `max_tokens`."""

    n: int
    max_tokens: int
    end_ids: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    @classmethod
    def from_config(cls, config: SamplingConfig, n: int, end_ids: tuple[int, ...], seed: int) -> "Sampling":
        return cls(n, config.response_length, end_ids, config.temperature, config.top_p, config.top_k, seed)

    def seed_of(self, position: int, sample: int) -> int:
        """63 bits from a hash of run seed, stream position and sample: no two samples of a run share their noise."""
        digest = hashlib.sha256(f"{self.seed}/{position}/{sample}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1


Finished = dict[tuple[int, int], Rollout]  # completions by stream position and sample index


class EngineFailure(RuntimeError):
    """The engine behind a generator died or got stuck: another one can do its work. `starting`: it had not come up."""

    def __init__(self, reason: str, starting: bool = False):
        super().__init__(reason)
        self.starting = starting


class Generator(Protocol):
    """Samples completions with the snapshot that it loaded last. Used from the generation thread alone, `interrupt` apart.

    After an `EngineFailure`, which every method but these two may raise, there is nothing left to do but `close`. `answered` is when its
    engine gave a sign of life, in seconds of `time.monotonic`; None where there is no engine.
    """

    version: int
    answered: float | None

    def start(self) -> None:
        """Take devices and processes. Without it the first use does."""

    def load_weights(self, snapshot: Snapshot) -> None:
        """Sample with this snapshot from now on; when it returns, no trace of an older one is left."""

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, finished: Finished | None = None) -> list[Rollout]:
        """`sampling.n` rollouts a prompt, in prompt order, then sample order. Completions are put into `finished` as they end, and what
        it holds already need not be sampled again."""

    def score(self, ids: list[int]) -> list[float]:
        """The log-probability, at temperature 1, of each of `ids[1:]` given what precedes it."""

    def interrupt(self) -> None:
        """From any thread: make whatever runs, and whatever is called from now on, raise `InterruptedError` soon."""

    def close(self) -> None:
        """Give back devices and processes, for sure and within a bounded time, from any state."""


class HFGenerator:
    """`transformers` generation, in this process, with a model of its own; or with the training model itself when `shared`.

    `shared` is for synchronous runs, in which the training model is idle while this one samples: weights are not copied.
    Randomness comes from one generator a response, seeded by position and sample, and never from the global state.
    """

    def __init__(self, model: PreTrainedModel, pad_token_id: int, batch_size: int = 128, shared: bool = False):
        self.model, self.pad_token_id, self.batch_size, self.shared = model, pad_token_id, batch_size, shared
        self.version, self.answered = -1, None
        self._interrupted = threading.Event()

    def start(self) -> None:
        pass

    def load_weights(self, snapshot: Snapshot) -> None:
        if not self.shared:
            weights = load_file(snapshot.path)
            own = dict(self.model.named_parameters())
            if own.keys() != weights.keys():
                raise ValueError(
                    f"snapshot {snapshot.version} does not fit the generator's model: {sorted(own.keys() ^ weights.keys())[:6]}"
                )
            with torch.no_grad():
                for name, parameter in own.items():
                    parameter.copy_(weights[name])
        self.version = snapshot.version

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, finished: Finished | None = None) -> list[Rollout]:
        by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids))
        at_a_time = max(1, self.batch_size // sampling.n)
        groups: dict[int, list[Rollout]] = {}
        was_training = self.model.training
        self.model.eval()
        for start in range(0, len(prompts), at_a_time):
            chunk = by_length[start : start + at_a_time]
            rollouts = self._generate([prompts[i] for i in chunk], sampling)
            groups.update((i, rollouts[j * sampling.n : (j + 1) * sampling.n]) for j, i in enumerate(chunk))
            if finished is not None:
                finished.update(((rollout.position, rollout.sample), rollout) for rollout in rollouts)
        self.model.train(was_training)
        return [rollout for i in range(len(prompts)) for rollout in groups[i]]

    @torch.no_grad()
    def _generate(self, prompts: list[Prompt], sampling: Sampling) -> list[Rollout]:
        started = time.perf_counter()
        device = self.model.device
        longest = max(len(prompt.ids) for prompt in prompts)
        lengths = torch.tensor([len(prompt.ids) for prompt in prompts], device=device)
        ids = torch.tensor([[self.pad_token_id] * (longest - len(prompt.ids)) + prompt.ids for prompt in prompts], device=device)
        mask = (torch.arange(longest, device=device) >= longest - lengths[:, None]).long()
        jobs = [(prompt, sample) for prompt in prompts for sample in range(sampling.n)]
        sampler = _Sampler([sampling.seed_of(prompt.position, sample) for prompt, sample in jobs], sampling)
        processors = LogitsProcessorList()
        if sampling.temperature:
            processors.append(_Temperature(sampling.temperature))
        if sampling.top_k:
            processors.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            processors.append(TopPLogitsWarper(sampling.top_p))
        output = self.model.generate(
            ids.repeat_interleave(sampling.n, 0),
            attention_mask=mask.repeat_interleave(sampling.n, 0),
            past_key_values=self._prompt_cache(ids, mask, sampling.n),
            max_new_tokens=sampling.max_tokens,
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            eos_token_id=list(sampling.end_ids),
            pad_token_id=self.pad_token_id,
            logits_processor=LogitsProcessorList([*processors, sampler]),
            stopping_criteria=StoppingCriteriaList([_Interrupt(self._interrupted)]),
            return_dict_in_generate=False,
        )
        if self._interrupted.is_set():
            raise InterruptedError
        finished = time.perf_counter()
        logprobs = torch.stack(sampler.logprobs, 1).tolist()
        responses = output[:, longest:].tolist()
        return [
            self._rollout(prompt, sample, ids, values, sampling, started, finished)
            for (prompt, sample), ids, values in zip(jobs, responses, logprobs, strict=True)
        ]

    def _prompt_cache(self, ids: torch.Tensor, mask: torch.Tensor, n: int) -> DynamicCache | None:
        """Keys and values of every prompt but its last token, computed once and repeated for its n samples."""
        if n == 1 or ids.shape[1] == 1:
            return None
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, :-1]
        output = self.model(ids[:, :-1], attention_mask=mask[:, :-1], position_ids=positions, use_cache=True, logits_to_keep=1)
        output.past_key_values.batch_repeat_interleave(n)
        return output.past_key_values

    def _rollout(self, prompt, sample, ids, logprobs, sampling, started, finished) -> Rollout:
        end = next((i for i, token in enumerate(ids) if token in sampling.end_ids), None)
        length = len(ids) if end is None else end + 1
        return Rollout(
            position=prompt.position,
            row=prompt.row,
            sample=sample,
            prompt_ids=prompt.ids,
            response_ids=ids[:length],
            logprobs=logprobs[:length],
            versions=[self.version] * length,
            finish_reason="length" if end is None else "stop",
            started=started,
            finished=finished,
        )

    @torch.no_grad()
    def score(self, ids: list[int]) -> list[float]:
        tokens = torch.tensor([ids], device=self.model.device)
        logprobs = self.model(tokens).logits[:, :-1].float().log_softmax(-1)
        return logprobs.gather(-1, tokens[:, 1:, None])[0, :, 0].tolist()

    def interrupt(self) -> None:
        self._interrupted.set()

    def close(self) -> None:
        pass


class _Temperature(LogitsProcessor):
    def __init__(self, temperature: float):
        self.temperature = temperature

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.float() / self.temperature


class _Sampler(LogitsProcessor):
    """Draws by the inverse of the distribution function, one uniform number a token, and leaves greedy search that token alone."""

    def __init__(self, seeds: list[int], sampling: Sampling):
        self.greedy = sampling.temperature == 0
        draws = [torch.rand(sampling.max_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        self.uniform = torch.stack(draws, 1)[..., None]
        self.logprobs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.float()
        if self.greedy:
            chosen = scores.argmax(-1, keepdim=True)
        else:
            below = scores.double().softmax(-1).cumsum(-1)
            drawn = self.uniform[len(self.logprobs)].to(scores.device) * below[:, -1:]
            chosen = torch.searchsorted(below, drawn, right=True).clamp(max=scores.shape[-1] - 1)
        self.logprobs.append((scores.gather(-1, chosen) - scores.logsumexp(-1, keepdim=True))[:, 0])
        return torch.full_like(scores, -torch.inf).scatter(-1, chosen, 0.0)


class _Interrupt(StoppingCriteria):
    def __init__(self, event: threading.Event):
        self.event = event

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs) -> torch.Tensor:
        return torch.full((len(input_ids),), self.event.is_set(), device=input_ids.device)


class ReplayGenerator:
    """Hands out recorded rollouts by stream position, for studying a loss without an engine."""

    def __init__(self, path: str):
        self.version, self.answered = -1, None
        self._by_position: dict[int, list[Rollout]] = defaultdict(list)
        for rollout in read_rollouts(path):
            rollout.rewards = None  # a replay's rewards are its own
            self._by_position[rollout.position].append(rollout)

    def start(self) -> None:
        pass

    def load_weights(self, snapshot: Snapshot) -> None:
        self.version = snapshot.version

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, finished: Finished | None = None) -> list[Rollout]:
        rollouts = []
        for prompt in prompts:
            recorded = sorted(self._by_position.get(prompt.position, []), key=lambda rollout: rollout.sample)[: sampling.n]
            if len(recorded) < sampling.n or recorded[0].prompt_ids != prompt.ids:
                raise ValueError(
                    f"replay: position {prompt.position} has {len(recorded)} recorded rollouts of this prompt, {sampling.n} are needed; "
                    "data set, seed and num_generations must be those of the recorded run"
                )
            rollouts += recorded
        return rollouts

    def score(self, ids: list[int]) -> list[float]:
        return []

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass


class FakeGenerator:
    """Seeded random tokens, for tests: settable seconds a batch, response lengths, and failures."""

    def __init__(self, vocab_size: int, seconds: float = 0.0, lengths: Sequence[int] = (4, 7, 2), fail_at: int | None = None):
        self.version, self.answered = -1, None
        self.calls = 0
        self.busy_seconds = 0.0
        self.closed = False
        self._vocab_size, self._seconds, self._lengths, self._fail_at = vocab_size, seconds, lengths, fail_at
        self._interrupted = threading.Event()

    def start(self) -> None:
        pass

    def load_weights(self, snapshot: Snapshot) -> None:
        self.version = snapshot.version

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, finished: Finished | None = None) -> list[Rollout]:
        finished = {} if finished is None else finished
        self.calls += 1
        if self.calls == self._fail_at:
            raise RuntimeError(f"fake generator fails on call {self.calls}")
        started = time.perf_counter()
        if self._interrupted.wait(self._seconds):
            raise InterruptedError
        self.busy_seconds += time.perf_counter() - started
        for prompt in prompts:
            for sample in range(sampling.n):
                if (prompt.position, sample) not in finished:
                    finished[prompt.position, sample] = self._rollout(prompt, sample, sampling, started, time.perf_counter())
        return [finished[prompt.position, sample] for prompt in prompts for sample in range(sampling.n)]

    def _rollout(self, prompt: Prompt, sample: int, sampling: Sampling, started: float, finished: float) -> Rollout:
        noise = torch.Generator().manual_seed(sampling.seed_of(prompt.position, sample))
        wanted = self._lengths[(prompt.position * sampling.n + sample) % len(self._lengths)]
        length = min(wanted, sampling.max_tokens)
        allowed = torch.tensor([i for i in range(self._vocab_size) if i not in sampling.end_ids])
        ids = allowed[torch.randint(len(allowed), (length,), generator=noise)].tolist()
        if wanted <= sampling.max_tokens:
            ids[-1] = sampling.end_ids[0]
        return Rollout(
            position=prompt.position,
            row=prompt.row,
            sample=sample,
            prompt_ids=prompt.ids,
            response_ids=ids,
            logprobs=[-1.0] * length,
            versions=[self.version] * length,
            finish_reason="stop" if wanted <= sampling.max_tokens else "length",
            started=started,
            finished=finished,
        )

    def score(self, ids: list[int]) -> list[float]:
        return []

    def interrupt(self) -> None:
        self._interrupted.set()

    def close(self) -> None:
        self.closed = True
