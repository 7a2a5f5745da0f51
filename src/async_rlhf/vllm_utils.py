"""The vLLM generator: an engine pinned to its own device, whose weights follow the trainer's snapshots."""

import asyncio
import itertools
import os
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from async_rlhf.config import GeneratorConfig, ModelConfig, UserError, require
from async_rlhf.engine_process import EngineProcess
from async_rlhf.generation import EngineFailure, Finished, Generator, HFGenerator, ReplayGenerator, Sampling
from async_rlhf.models import load_causal_lm
from async_rlhf.rollout import Prompt, Rollout
from async_rlhf.weights import Snapshot

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # vLLM 0.32's CPU attention kernels


# -- devices ----------------------------------------------------------------------------------------------------------------


def choose_device(vllm_device: str | None, training_processes: int) -> str:
    """Where the engine runs, `cuda:N` or `cpu:N[,M…]`.

    By default the GPU after the last training process's, or where there is none the first GPU, shared; without a GPU the last
    core, or the only one, shared.

    Raises:
        UserError: the named device does not exist on this machine.
    """
    gpus, cores = torch.cuda.device_count(), sorted(os.sched_getaffinity(0))
    if vllm_device is None:
        if gpus:
            return f"cuda:{training_processes if training_processes < gpus else 0}"
        return f"cpu:{cores[-1]}"
    kind, _, index = vllm_device.partition(":")
    require(kind in ("cuda", "cpu") and re.fullmatch(r"\d+(,\d+)*", index), f"vllm_device {vllm_device!r}: write cuda:3 or cpu:1")
    if kind == "cuda":
        require(gpus, f"vllm_device {vllm_device!r}: this machine has no CUDA GPU; cpu:{cores[-1]} is its last core")
        require(int(index) < gpus, f"vllm_device {vllm_device!r}: this machine has cuda:0 to cuda:{gpus - 1}")
    else:
        absent = [core for core in map(int, index.split(",")) if core not in cores]
        require(not absent, f"vllm_device {vllm_device!r}: this process may use the cores {cores}")
    return vllm_device


def check_engine_model(model_config, engine_device: str) -> None:
    """Raise `UserError` for a model that a CPU engine would start with and die of at its first request."""
    size = getattr(model_config, "head_dim", None) or model_config.hidden_size // model_config.num_attention_heads
    require(
        engine_device.startswith("cuda") or size in CPU_HEAD_SIZES,
        f"the policy's attention heads are {size} wide, and vLLM on a CPU takes {', '.join(map(str, CPU_HEAD_SIZES))}: set generator: hf",
    )


def trainer_cores(engine_device: str) -> list[int]:
    """The CPU cores left to the trainer when the engine has its own; all of them when it is on a GPU or there is but one."""
    cores = sorted(os.sched_getaffinity(0))
    taken = set(map(int, engine_device.removeprefix("cpu:").split(","))) if engine_device.startswith("cpu:") else set()
    return [core for core in cores if core not in taken] or cores


# -- in the engine's worker -------------------------------------------------------------------------------------------------


class WeightLoader:
    """Mixed into vLLM's worker (`worker_extension_cls`): loads a snapshot file into the running model."""

    def load_snapshot(self, path: str) -> None:
        def tensors():
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    yield name, file.get_tensor(name)

        self.reload_weights(weights_iterator=tensors())
        # A tied lm_head on a CPU computes with a packed copy of the embedding that a reload leaves as it was.
        head = getattr(self.model_runner.get_model(), "lm_head", None)
        if head is not None and getattr(head, "quant_method", None) is not None and self.device.type == "cpu":
            head.quant_method.process_weights_after_loading(head)


# -- the generator ------------------------------------------------------------------------------------------------------------


class VLLMGenerator:
    """An `AsyncLLM` engine. Made, used and closed in one thread; only `interrupt` is for others. See `EngineProcess` for what it raises."""

    worker_extension = f"{__name__}.{WeightLoader.__name__}"

    def __init__(self, config: GeneratorConfig, model_path: str, device: str, dtype: str, max_model_len: int, trust_remote_code: bool):
        self.version = -1
        self._ids = itertools.count()
        on_cpu = device.startswith("cpu")
        settings = dict(
            model=model_path,
            dtype=dtype,
            max_model_len=max_model_len,
            seed=0,
            skip_tokenizer_init=True,
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            worker_extension_cls=self.worker_extension,
            enforce_eager=on_cpu if config.vllm_enforce_eager is None else config.vllm_enforce_eager,
            enable_log_requests=False,
            disable_log_stats=True,
            trust_remote_code=trust_remote_code,
        )
        if on_cpu:  # a seeded request whose prompt is chunked kills a CPU engine
            settings |= dict(enable_chunked_prefill=False, max_num_batched_tokens=max(2048, max_model_len), max_num_seqs=128)
        else:
            settings |= dict(gpu_memory_utilization=config.vllm_gpu_memory_utilization)
        self._process = EngineProcess(settings, device, config)

    @property
    def answered(self) -> float | None:
        return self._process.answered

    def start(self) -> None:
        self._process.start()

    def load_weights(self, snapshot: Snapshot) -> None:
        """Between batches the engine is idle, so the pause drops cached prefixes and holds nothing up."""

        async def load(engine: "AsyncLLM") -> None:
            await engine.pause_generation(mode="keep", clear_cache=True)
            await engine.collective_rpc("load_snapshot", args=(str(snapshot.path),))
            await engine.update_weight_version(str(snapshot.version))
            await engine.resume_generation()

        self._process.run(load)
        self.version = snapshot.version

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, finished: Finished | None = None) -> list[Rollout]:
        finished = {} if finished is None else finished
        wanted = [(prompt, sample) for prompt in prompts for sample in range(sampling.n)]

        async def sample(engine: "AsyncLLM", prompt: Prompt, index: int) -> None:
            finished[prompt.position, index] = await self._sample(engine, prompt, index, sampling)

        async def missing(engine: "AsyncLLM") -> None:
            absent = [(prompt, index) for prompt, index in wanted if (prompt.position, index) not in finished]
            tasks = [asyncio.ensure_future(sample(engine, prompt, index)) for prompt, index in absent]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()

        self._process.run(missing)
        return [finished[prompt.position, index] for prompt, index in wanted]

    async def _sample(self, engine: "AsyncLLM", prompt: Prompt, sample: int, sampling: Sampling) -> Rollout:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        started = time.perf_counter()
        params = SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed_of(prompt.position, sample),
            stop_token_ids=list(sampling.end_ids),
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        output = (await self._request(engine, prompt.ids, params)).outputs[0]
        if output.finish_reason not in ("stop", "length"):
            raise EngineFailure(f"the vLLM engine ended a completion by {output.finish_reason!r}")
        ids = list(output.token_ids)
        versions = [self.version] * len(ids)
        for span in output.weight_versions or []:
            versions[span.start : span.end] = [int(span.version)] * (span.end - span.start)
        return Rollout(
            position=prompt.position,
            row=prompt.row,
            sample=sample,
            prompt_ids=prompt.ids,
            response_ids=ids,
            logprobs=[entry[token].logprob for entry, token in zip(output.logprobs, ids, strict=True)],
            versions=versions,
            finish_reason="stop" if ids and ids[-1] in sampling.end_ids else "length",
            started=started,
            finished=time.perf_counter(),
        )

    def score(self, ids: list[int]) -> list[float]:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False, seed=0)
        output = self._process.run(lambda engine: self._request(engine, ids, params))
        return [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]

    async def _request(self, engine: "AsyncLLM", ids: list[int], params: "SamplingParams") -> "RequestOutput":
        final = None
        async for output in engine.generate({"prompt_token_ids": ids}, params, request_id=str(next(self._ids))):
            final = output
        return final

    def interrupt(self) -> None:
        self._process.interrupt()

    def close(self) -> None:
        self._process.close()


def open_generator(
    config: GeneratorConfig,
    model_path: str,
    tokenizer: PreTrainedTokenizerBase,
    dtype: str,
    max_model_len: int,
    shared_model: PreTrainedModel | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
) -> Generator:
    """The generator that the configuration names. Call it in the thread that will use it.

    `shared_model` is the training model, for `generator: hf` in a synchronous run; otherwise a copy is loaded from `model_path`.
    """
    if config.generator == "replay":
        return ReplayGenerator(config.replay_path)
    if config.generator == "hf":
        model = shared_model
        if model is None:
            model = load_causal_lm(ModelConfig(model_path, torch_dtype=dtype, trust_remote_code=trust_remote_code))
            model.to("cuda" if torch.cuda.is_available() else "cpu")
        return HFGenerator(model, tokenizer.pad_token_id, config.hf_generation_batch_size, shared=shared_model is not None)
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise UserError(
            "generator: vllm needs vLLM: install requirements.txt (CUDA) or requirements-cpu.txt, or set generator: hf"
        ) from error
    device = device or choose_device(config.vllm_device, training_processes=1)
    dtype = dtype if config.vllm_dtype == "auto" else config.vllm_dtype
    return VLLMGenerator(config, model_path, device, dtype, max_model_len, trust_remote_code)
