"""The vLLM generator: an engine in its own process, pinned to its own device, whose weights follow the trainer's snapshots."""

import asyncio
import gc
import itertools
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from async_rlhf.config import GeneratorConfig, ModelConfig, UserError, require
from async_rlhf.generation import Generator, HFGenerator, ReplayGenerator, Sampling
from async_rlhf.models import load_causal_lm
from async_rlhf.rollout import Prompt, Rollout
from async_rlhf.weights import Snapshot

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

# Left by torchrun, accelerate and Slurm for the trainer's processes; an engine that read them would try to join them.
DISTRIBUTED_VARIABLES = re.compile(
    r"(RANK|LOCAL_RANK|GROUP_RANK|ROLE_RANK|ROLE_NAME|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_WORLD_SIZE|ROLE_WORLD_SIZE|MASTER_ADDR|MASTER_PORT"
    r"|NODE_RANK|OMP_NUM_THREADS|(TORCHELASTIC|TORCH_NCCL|ACCELERATE|FSDP|DEEPSPEED|PMI|PMIX|SLURM)_\w+)"
)

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


@contextmanager
def _engine_environment(device: str, config: GeneratorConfig) -> Iterator[None]:
    """While the engine's processes are spawned: no variable of the trainer's process group, and the engine's own device.

    On a CPU the calling thread is bound to the engine's cores as well, since a process inherits the affinity of the thread that
    starts it and vLLM binds only its OpenMP threads.
    """
    saved, affinity = dict(os.environ), os.sched_getaffinity(0)
    for name in filter(DISTRIBUTED_VARIABLES.fullmatch, saved):
        del os.environ[name]
    os.environ |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_NO_USAGE_STATS": "1"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    kind, _, index = device.partition(":")
    if kind == "cpu":
        os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": index, "VLLM_CPU_KVCACHE_SPACE": str(config.vllm_cpu_kvcache_gib)}
        os.sched_setaffinity(0, set(map(int, index.split(","))))
    else:
        visible = [name for name in saved.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[int(index)] if visible else index
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= saved
        os.sched_setaffinity(0, affinity)


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
    """An `AsyncLLM` engine. Made, used and closed in one thread, whose event loop it owns; only `interrupt` is for other threads."""

    def __init__(self, config: GeneratorConfig, model_path: str, device: str, dtype: str, max_model_len: int, trust_remote_code: bool):
        self.version = -1
        self._timeout = config.generator_timeout
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task | None = None
        self._interrupted = False
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
            worker_extension_cls=f"{__name__}.{WeightLoader.__name__}",
            enforce_eager=on_cpu if config.vllm_enforce_eager is None else config.vllm_enforce_eager,
            enable_log_requests=False,
            disable_log_stats=True,
            trust_remote_code=trust_remote_code,
        )
        if on_cpu:  # a seeded request whose prompt is chunked kills a CPU engine
            settings |= dict(enable_chunked_prefill=False, max_num_batched_tokens=max(2048, max_model_len), max_num_seqs=128)
        else:
            settings |= dict(gpu_memory_utilization=config.vllm_gpu_memory_utilization)
        with _engine_environment(device, config):
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            async def start() -> AsyncLLM:
                return AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))

            self._engine = self._loop.run_until_complete(start())

    def load_weights(self, snapshot: Snapshot) -> None:
        """Between batches the engine is idle, so the pause drops cached prefixes and holds nothing up."""

        async def load():
            await self._engine.pause_generation(mode="keep", clear_cache=True)
            await self._engine.collective_rpc("load_snapshot", args=(str(snapshot.path),))
            await self._engine.update_weight_version(str(snapshot.version))
            await self._engine.resume_generation()

        self._run(load())
        self.version = snapshot.version

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Rollout]:
        async def all_samples():
            return await asyncio.gather(*(self._sample(prompt, sample, sampling) for prompt in prompts for sample in range(sampling.n)))

        return self._run(all_samples())

    async def _sample(self, prompt: Prompt, sample: int, sampling: Sampling) -> Rollout:
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
        output = (await self._request(prompt.ids, params)).outputs[0]
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
        output = self._run(self._request(ids, params))
        return [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]

    async def _request(self, ids: list[int], params) -> "RequestOutput":
        final = None
        async for output in self._engine.generate({"prompt_token_ids": ids}, params, request_id=str(next(self._ids))):
            final = output
        return final

    def _run(self, coroutine):
        async def bounded():
            return await asyncio.wait_for(coroutine, self._timeout)

        if self._interrupted:
            coroutine.close()
            raise InterruptedError
        self._task = self._loop.create_task(bounded())
        try:
            return self._loop.run_until_complete(self._task)
        except asyncio.CancelledError as error:
            raise InterruptedError from error
        except TimeoutError as error:
            raise TimeoutError(f"the vLLM engine gave no answer within {self._timeout:.0f} s (generator_timeout)") from error

    def interrupt(self) -> None:
        self._interrupted = True
        self._loop.call_soon_threadsafe(lambda: self._task and self._task.cancel())

    def close(self) -> None:
        self._engine.shutdown(timeout=10)
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()
        del self._engine
        gc.collect()


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
