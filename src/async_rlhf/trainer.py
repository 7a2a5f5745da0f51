"""The loop: take a batch that the generator made, score it, train on it, publish the weights. One loop for every algorithm."""

import os
import traceback
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed
from torch import nn
from tqdm import tqdm
from transformers import AutoConfig

from async_rlhf import distributed
from async_rlhf.algorithm import Algorithm, ScoredBatch, Tensors
from async_rlhf.batching import micro_batches, select, split_to
from async_rlhf.checkpoint import (
    STATE,
    Progress,
    find_checkpoint,
    load_progress,
    load_state,
    new_folder,
    random_states,
    restore_random_states,
    rewind,
    save_state,
)
from async_rlhf.config import BatchPlan, RLConfig, parse, require
from async_rlhf.data import Encoder, PromptData, PromptStream, load_prompts, quiet_libraries
from async_rlhf.dry_run import check_paths, dry_run, reward_columns
from async_rlhf.generation import Sampling
from async_rlhf.losses import penalize_missing_eos, sequence_sum
from async_rlhf.metrics import Metrics, Timers, append_json
from async_rlhf.model_card import check_push, model_card, push_checkpoint
from async_rlhf.models import (
    Policy,
    disable_dropout,
    end_token_ids,
    length_mask,
    load_causal_lm,
    load_tokenizer,
    lora_config,
    pad_tokens,
    save_model,
    token_logprobs,
    trained_dtype,
)
from async_rlhf.optimization import ModuleOptimizer, open_accelerator
from async_rlhf.pipeline import Evaluation, GenerationPipeline, Pacing
from async_rlhf.rewards import RewardContext, Scores, load_rewards, rollout_samples
from async_rlhf.rollout import Prompt, Rollout, RolloutBatch, batch_record, read_batch, write_rollouts
from async_rlhf.runs import claim_folder, link_output, place_run, record_run, run_settings
from async_rlhf.trackers import log, log_table, open_trackers
from async_rlhf.vllm_utils import check_engine_model, choose_device, open_generator, trainer_cores
from async_rlhf.weights import WeightStore, plain_model, whole_weights

PROBE_TOKENS = 48
TABLE_ROWS = 32
EVALUATION_POSITION = 1 << 40  # evaluation prompts stand there in the stream, so that their noise is their own


class Trainer:
    """Trains `algorithm` by the settings of `config`; `run` is the loop.

    Raises:
        UserError: the configuration names something that is not there; before any model is loaded.
    """

    def __init__(self, config: RLConfig, algorithm: Algorithm):
        self.config, self.algorithm, self.algorithm_name = config, algorithm, type(algorithm).__name__
        self.output = Path(config.output_dir)
        check_paths(config)
        check_push(config)
        self.accelerator = open_accelerator(config)
        self.plan = BatchPlan.of(config, distributed.world_size())
        set_seed(config.seed)
        self.tokenizer = load_tokenizer(config)
        self.encoder = Encoder(config, self.tokenizer)
        columns = reward_columns(config)
        self.prompts = load_prompts(config, self.encoder, "train", columns)
        self.eval_prompts = load_prompts(config, self.encoder, "eval", columns) if config.eval_steps else None
        self.engine_device = choose_device(config.vllm_device, distributed.world_size()) if config.generator == "vllm" else None
        self._check_model()
        checkpoint = distributed.broadcast(find_checkpoint(config) if distributed.is_main() else None)
        if distributed.is_main():
            self._open_folder(checkpoint)
        self._bind_to_cores()
        self._load_models()
        if distributed.is_main():  # from here on the folder holds a run
            settled = {
                "sft_model_path": self._reference_path(),
                "completions_per_update": self.plan.completions,
                "processes": self.plan.processes,
                "sharding": self.optimizer.sharding,
            }
            record_run(self.output, self.algorithm_name, asdict(config) | settled)
        self.metrics, self.timers = Metrics(), Timers()
        self.progress, self.held = Progress(0, {0: 0}), []
        if checkpoint:
            self._restore(checkpoint)

    # -- set-up -------------------------------------------------------------------------------------------------------------

    def _reference_path(self) -> str:
        return self.config.sft_model_path or self.config.model_name_or_path

    def _open_folder(self, checkpoint: Path | None) -> None:
        earlier = run_settings(self.config.output_dir) if self.config.resume_from_checkpoint else {}
        if earlier:
            self.config.wandb_run_id = earlier["wandb_run_id"]  # one run in the trackers, too
            rewind(self.output, load_progress(checkpoint) if checkpoint else None)
        else:
            claim_folder(self.output, self.config.overwrite_output_dir)
        open_trackers(self.accelerator, asdict(self.config), resume=bool(earlier))

    def _check_model(self) -> None:
        model_config = AutoConfig.from_pretrained(self.config.model_name_or_path, trust_remote_code=self.config.trust_remote_code)
        context = getattr(model_config, "max_position_embeddings", None) or 1 << 30
        longest = max(map(len, self.prompts.ids))
        require(
            longest + self.config.response_length <= context,
            f"longest prompt {longest} + response_length {self.config.response_length} is over the model's context {context}: "
            "lower max_prompt_length or response_length",
        )
        if self.engine_device:
            check_engine_model(model_config, self.engine_device)
        self.max_model_len = min(context, self.config.max_prompt_length + self.config.response_length)

    def _bind_to_cores(self) -> None:
        if self.accelerator.device.type == "cpu":
            cores = trainer_cores(self.engine_device or "")
            os.sched_setaffinity(0, cores)
            beside = self.config.generator == "hf" and self.config.max_staleness > 0  # generation computes in this process too
            torch.set_num_threads(max(1, len(cores) // (2 if beside else 1)))

    def _load_models(self) -> None:
        config, device = self.config, self.accelerator.device
        model = load_causal_lm(config, dtype=trained_dtype(config, self.accelerator.mixed_precision != "no"))
        self.end_ids = end_token_ids(model, self.tokenizer, config.stop_token_ids)
        disable_dropout(model)
        self.peft = lora_config(config)
        if self.peft:  # its own dropout, `lora_dropout`, is on in training alone
            from peft import get_peft_model

            model = get_peft_model(model, self.peft)
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        self.reference = None
        if not self.peft:
            reference = load_causal_lm(config, self._reference_path())
            self.reference = Policy(reference.requires_grad_(False), config.share_prompts).eval().to(device)
        dtype = getattr(torch, config.torch_dtype, torch.float32)
        context = RewardContext(device, self.tokenizer, config.reward_batch_size, dtype, config.trust_remote_code)
        self.rewards = load_rewards(config.rewards, "reward", context)
        mixed_precision = self.accelerator.mixed_precision != "no"
        module = self.algorithm.module(Policy(model, config.share_prompts), self.rewards, mixed_precision).train()
        self.optimizer = ModuleOptimizer(self.accelerator, config, module, self.plan.optimizer_steps)

    # -- the loop -----------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        config, main = self.config, distributed.is_main()  # asked now: at the end there are no ranks any more
        self.store = WeightStore(config.max_staleness + 1, config.snapshot_dir)
        self.pipeline = self._open_pipeline() if distributed.is_main() else None
        done, quiet = self.progress.updates, not distributed.is_main()
        self.bar = tqdm(total=self.plan.updates, initial=done, unit="update", disable=quiet, mininterval=1.0)
        saves = self.plan.saves(config.save_steps)
        try:
            self._publish(self.progress.updates)
            if self.pipeline:
                self.pipeline.start()
            for update in range(self.progress.updates, self.plan.updates):
                with self.timers.time("update"):
                    batch = self._next_batch(update)
                    scored = self._score(self._deal(batch, update), update)
                    self._train(self.algorithm.make_batch(scored, self.metrics), scored, update)
                    self._publish(update + 1)
                self._log(update, batch)
                if update + 1 in saves:
                    self._save(update + 1)
            if config.eval_steps:
                self._next_batch(self.plan.updates)
                if main:
                    (self.output / f"checkpoint-{self.plan.updates}" / "README.md").write_text(self._card(), encoding="utf-8")
        finally:
            self.bar.close()
            if self.pipeline:
                self.pipeline.close()
            self.store.close()
            self.accelerator.end_training()
        if main:
            link_output(self.output)
            if config.push_to_hub:
                print(f"pushed to {push_checkpoint(self.output / f'checkpoint-{self.plan.updates}', config)}")

    def _open_pipeline(self) -> GenerationPipeline:
        config = self.config
        sampling = Sampling.from_config(config, config.num_generations, self.end_ids, config.seed)
        evaluation = None
        if self.eval_prompts:
            rows = range(min(config.num_eval_prompts, len(self.eval_prompts)))
            held_out = [Prompt(EVALUATION_POSITION + row, row, self.eval_prompts.ids[row]) for row in rows]
            evaluation = Evaluation(held_out, Sampling.from_config(config, 1, self.end_ids, config.seed), config.eval_steps)
        bound = config.max_logprob_mismatch or (1e-3 if self.optimizer.dtype == torch.float32 else 0.5)
        return GenerationPipeline(
            open_generator=lambda: open_generator(
                config,
                config.model_name_or_path,
                self.tokenizer,
                str(self.optimizer.dtype).removeprefix("torch."),
                self.max_model_len,
                shared_model=self.optimizer.model if self._shares_model() else None,
                device=self.engine_device,
                trust_remote_code=config.trust_remote_code,
            ),
            stream=PromptStream(self.prompts.ids, config.seed),
            store=self.store,
            sampling=sampling,
            prompts_per_batch=self.plan.prompts,
            num_batches=self.plan.updates,
            pacing=Pacing(config.max_staleness, config.weight_update),
            timeout=config.generator_timeout,
            max_restarts=config.max_engine_restarts,
            wait_report=config.wait_report,
            evaluation=evaluation,
            max_mismatch=bound,
            first_batch=self.progress.updates + sum(batch.kind == "train" for batch in self.held),
            held=self.held,
            evaluated=self.progress.evaluated,
            score=self._score_in_pipeline if config.score_in_pipeline else None,
        )

    def _shares_model(self) -> bool:
        """A synchronous run's HF generator samples from the training model itself, which is idle then."""
        alone = distributed.world_size() == 1 and not self.peft
        return self.config.generator == "hf" and self.config.max_staleness == 0 and alone

    def _next_batch(self, done: int) -> RolloutBatch | None:
        """The next training batch, on every rank, or None when all `done` updates are; evaluations that come before it are scored and
        logged. A failure of the generator is raised on every rank."""
        while True:
            received, error = None, None
            with self.timers.time("trainer_wait"):
                if self.pipeline:
                    try:
                        received = self.pipeline.get()
                    except Exception as failure:
                        error = failure
                message = distributed.broadcast(received if error is None else "".join(traceback.format_exception(error)))
            if error is not None:
                raise error
            if isinstance(message, str):
                raise RuntimeError(f"the generator failed on rank 0:\n{message}")
            if message.kind == "train":
                return message
            self._evaluate(message, done)
            if message.index == self.plan.updates:
                return None

    def _deal(self, batch: RolloutBatch, update: int) -> list[list[Rollout]]:
        """This rank's prompts, mini-batch after mini-batch. Mini-batches are drawn over the whole batch first, so that any number
        of ranks trains on the same ones."""
        k, ranks = self.config.num_generations, distributed.world_size()
        groups = [batch.rollouts[i : i + k] for i in range(0, len(batch.rollouts), k)]
        order = np.random.default_rng([self.config.seed, update, 1]).permutation(len(groups))
        per_step = self.plan.prompts_per_mini_batch
        mine = [i for start in range(0, len(order), per_step) for i in order[start : start + per_step][distributed.rank() :: ranks]]
        if self.config.dump_rollouts and distributed.is_main():
            write_rollouts(self.output / "rollouts.jsonl", batch.rollouts, update=update)
        return [groups[i] for i in mine]

    def _score(self, groups: list[list[Rollout]], update: int) -> ScoredBatch:
        device, config = self.accelerator.device, self.config
        responses = [[rollout.response_ids for rollout in group] for group in groups]
        tokens = pad_tokens([group[0].prompt_ids for group in groups], responses, self.tokenizer.pad_token_id)
        shape = tokens["response_ids"].shape
        mask = length_mask(tokens["response_length"], shape[-1])
        with self.timers.time("score"):
            flat = [rollout for group in groups for rollout in group]
            raw, by_name = self._reward(flat, self.prompts)
            finished = torch.tensor([rollout.finish_reason == "stop" for rollout in flat])
            scores = penalize_missing_eos(raw, finished, config.missing_eos_penalty, config.missing_eos_score)
            tokens = {name: tensor.to(device) for name, tensor in tokens.items()}
            ref_logprobs = self._ref_logprobs(tokens)
        behaviour = torch.tensor([[r.logprobs + [0.0] * (shape[-1] - len(r.logprobs)) for r in group] for group in groups])
        self._observe(flat, scores, finished)
        for name, values in by_name.items():
            self.metrics.observe(f"reward/{name}", values)
        mask, behaviour = mask.to(device), behaviour.to(device)
        kl = sequence_sum(behaviour - ref_logprobs, mask)
        self.metrics.observe("objective/kl", kl.flatten().cpu())
        self.metrics.observe("objective/entropy", sequence_sum(-behaviour, mask).flatten().cpu())
        self.metrics.observe("objective/rlhf_reward", (scores.to(device) - self.algorithm.kl_coef * kl.flatten()).cpu())
        scores = scores.view(shape[:2]).to(device)
        behind = torch.tensor([self.optimizer.steps - self.progress.steps_at[group[0].versions[0]] for group in groups], device=device)
        evaluate = partial(self._evaluate_module, tokens)
        return ScoredBatch(update, groups, tokens, mask, scores, behaviour, ref_logprobs, behind, evaluate)

    def _reward(self, rollouts: list[Rollout], prompts: PromptData) -> Scores:
        """What the rewards give; asked already where they score in the pipeline."""
        if self.config.score_in_pipeline:
            names = [part.name for part in self.rewards.parts]
            return self.rewards.sum({name: torch.tensor([rollout.rewards[name] for rollout in rollouts]) for name in names})
        return self.rewards.score(rollout_samples(rollouts, prompts.rows, self.encoder))

    def _score_in_pipeline(self, batch: RolloutBatch) -> None:
        prompts = self.prompts if batch.kind == "train" else self.eval_prompts
        by_name = self.rewards.score(rollout_samples(batch.rollouts, prompts.rows, self.encoder)).by_name
        for i, rollout in enumerate(batch.rollouts):
            rollout.rewards = {name: float(scores[i]) for name, scores in by_name.items()}

    def _observe(self, rollouts: list[Rollout], scores: torch.Tensor, finished: torch.Tensor) -> None:
        self.metrics.observe("objective/score", scores, std_name="objective/score_std")
        self.metrics.observe("rollout/response_length", [len(rollout.response_ids) for rollout in rollouts])
        self.metrics.observe("rollout/eos_frac", finished.float())

    @torch.no_grad()
    def _ref_logprobs(self, tokens: Tensors) -> torch.Tensor:
        policy = self.reference or self.optimizer.unwrapped.policy
        with policy.model.disable_adapter() if self.peft else nullcontext():
            return self._forward(policy, tokens)

    @torch.no_grad()
    def _evaluate_module(self, tokens: Tensors, **options) -> Any:
        module = self.optimizer.unwrapped.eval()
        with self.timers.time("score"), self.accelerator.autocast():
            outputs = self._forward(module, tokens, **options)
        module.train()
        return outputs

    def _forward(self, module: nn.Module, tokens: Tensors, **options) -> Any:
        """What the module gives for every row, one tensor or several, in the rows' order."""
        chunks = micro_batches(tokens, self.plan.prompts_per_forward)
        outputs = [module(**select(tokens, chunk), temperature=self.config.temperature, **options) for chunk in chunks]
        order = torch.argsort(torch.cat(chunks)).to(self.accelerator.device)
        if isinstance(outputs[0], torch.Tensor):
            return torch.cat(outputs)[order]
        return tuple(torch.cat(parts)[order] for parts in zip(*outputs, strict=True))

    def _train(self, batch: Tensors, scored: ScoredBatch, update: int) -> None:
        per_step = len(batch["weight"]) // self.config.num_mini_batches
        versions = [version for group in scored.rollouts for rollout in group for version in rollout.versions]
        self.metrics.observe("staleness/batches_mean", [update - version for version in versions])
        self.metrics.maximum("staleness/batches_max", update - min(versions))
        sampled_at = torch.tensor([self.progress.steps_at[version] for version in versions], dtype=torch.float64)
        started = self.optimizer.steps
        with self.timers.time("train"):
            stopped = False
            for epoch in range(self.config.num_ppo_epochs):
                order = np.random.default_rng([self.config.seed, update, 2, epoch]).permutation(self.config.num_mini_batches)
                stopped = epoch > 0 and (stopped or self.algorithm.stops())
                if epoch:
                    self.metrics.mean("policy/stopped_epochs", float(stopped), 1)
                for index in order if epoch else range(self.config.num_mini_batches):
                    if stopped:  # the schedule and the count of steps go on as planned
                        self.optimizer.pass_step()
                        continue
                    self.metrics.observe("staleness/steps_mean", self.optimizer.steps - sampled_at)
                    self.metrics.maximum("staleness/steps_max", self.optimizer.steps - sampled_at.min())
                    rows = slice(index * per_step, (index + 1) * per_step)
                    mini_batch = {name: tensor[rows] for name, tensor in batch.items()}
                    taken = torch.full_like(mini_batch["weight"], self.optimizer.steps - started)
                    self._step(mini_batch | {"steps_in_update": taken})

    def _step(self, mini_batch: Tensors) -> None:
        """One optimizer step on the mini-batch; skipped, and counted, where no rank has anything to learn from."""
        units = distributed.all_sum(mini_batch["weight"].sum())
        self.metrics.mean(f"{self.algorithm.name}/skipped_steps", float(units == 0), 1)
        chunks = micro_batches(mini_batch, self.plan.prompts_per_forward)
        chunks = split_to(chunks, max(distributed.all_gather(len(chunks))))
        forwards = [select(mini_batch, chunk) for chunk in chunks]
        self.optimizer.step(forwards, units, lambda module, rows: self.algorithm.loss(module, rows, self.metrics))

    # -- after an update ----------------------------------------------------------------------------------------------------

    def _publish(self, version: int) -> None:
        self.progress.steps_at[version] = self.optimizer.steps
        if not self.pipeline:
            return
        with self.timers.time("weight_sync"):
            probe = self.prompts.ids[0][:PROBE_TOKENS]
            tensors = None if self._shares_model() else whole_weights(self.optimizer.model, self.optimizer.dtype)
            self.store.publish(version, self.optimizer.steps, tensors, probe, self._probe_logprobs(probe))

    @torch.no_grad()
    def _probe_logprobs(self, ids: list[int]) -> list[float]:
        if len(ids) < 2:
            return []
        tokens = torch.tensor([ids], device=self.accelerator.device)
        self.optimizer.model.eval()
        with self.accelerator.autocast():
            logits = self.optimizer.model(tokens).logits
        self.optimizer.model.train()
        return token_logprobs(logits[:, :-1], tokens[:, 1:])[0].tolist()

    def _log(self, update: int, batch: RolloutBatch) -> None:
        values, self.metrics = self.metrics.reduce(), Metrics()
        seconds = self.timers.take()
        tokens = sum(len(rollout.response_ids) for rollout in batch.rollouts)
        record = {
            "episode": (update + 1) * self.plan.completions,
            "step": update + 1,
            "version": batch.version,
            "lr": self.optimizer.learning_rate,
            **values,
            "rollout/tokens": tokens,
            "generator/restarts": batch.restarts,
            "time/generate": batch.generate_seconds,
            "time/generator_wait": batch.generator_wait_seconds,
            **{f"time/{name}": seconds.get(name, 0.0) for name in ("update", "score", "train", "trainer_wait")},
            "time/weight_sync": seconds.get("weight_sync", 0.0) + batch.weight_sync_seconds,
            "throughput/episodes_per_s": self.plan.completions / seconds["update"],
            "throughput/tokens_per_s": tokens / seconds["update"],
        }
        if batch.mismatch is not None:
            record["mismatch/logprob_abs"] = batch.mismatch
        self.progress.last_record = record
        if distributed.is_main():
            append_json(self.output / "metrics.jsonl", record)
            self.bar.set_postfix_str(
                f"{record['throughput/episodes_per_s']:.1f} episodes/s, score {record['objective/score']:.3f}, "
                f"KL {record['objective/kl']:.2f}, staleness {record['staleness/batches_mean']:.2f}"
            )
            self.bar.update()
        log(self.accelerator, record, update + 1)

    def _evaluate(self, batch: RolloutBatch, done: int) -> None:
        """Score held-out completions, write them to a file and log their mean. Trackers take no step twice and none that is past, so they
        get it at the updates `done`, with the snapshot's version beside it."""
        mine = batch.rollouts[distributed.rank() :: distributed.world_size()]
        samples = rollout_samples(mine, self.eval_prompts.rows, self.encoder)
        scores = self._reward(mine, self.eval_prompts).total
        gathered = distributed.all_gather([(s.prompt, s.response, s.finished, float(x)) for s, x in zip(samples, scores, strict=True)])
        rows = [row for rank in gathered for row in rank]
        values = {
            "eval/score": float(np.mean([row[3] for row in rows])),
            "eval/eos_frac": float(np.mean([row[2] for row in rows])),
            "eval/response_length": float(np.mean([len(rollout.response_ids) for rollout in batch.rollouts])),
        }
        self.progress.last_evaluation = values | {"eval/version": batch.version}
        if distributed.is_main():
            record = {"version": batch.version, "step": batch.version, "episode": batch.version * self.plan.completions, **values}
            append_json(self.output / "eval.jsonl", record)
            folder = self.output / "completions"
            folder.mkdir(exist_ok=True)
            lines = [dict(zip(("prompt", "response", "finished", "score"), row, strict=True)) for row in rows]
            for line in lines:
                append_json(folder / f"eval-{batch.version:06d}.jsonl", line)
            log_table(self.accelerator, "eval/completions", lines[:TABLE_ROWS], step=done)
        log(self.accelerator, {**values, "eval/version": batch.version}, done)

    def _save(self, updates: int) -> None:
        """A checkpoint, at the end of an update. It waits for the batches that were to be sampled with snapshots before this one."""
        self.progress.updates = updates
        if self.pipeline:
            self.held, self.progress.evaluated = self.pipeline.hold(updates + self.config.max_staleness)
        random_states_of_ranks = distributed.all_gather(random_states())
        with new_folder(self.output / f"checkpoint-{updates}", self.config.save_total_limit) as folder:
            self.optimizer.save_shards(folder / STATE)
            if distributed.is_main():
                model, weights = plain_model(self.optimizer.model)
                beside = {name: plain_model(other) for name, other in self.algorithm.models(self.optimizer.unwrapped).items()}
                save_model(model, self.tokenizer, folder, weights, self._card(), beside)
                state = {"optimizer": self.optimizer.state_dict(), "algorithm": self.algorithm.state_dict()}
                state |= {"rewards": self.rewards.state_dict(), "random": random_states_of_ranks}
                save_state(folder, self.progress, state | {"held": [batch_record(batch) for batch in self.held]}, self.output)

    def _restore(self, checkpoint: Path) -> None:
        self.progress, state = load_progress(checkpoint), load_state(checkpoint)
        self.optimizer.load_shards(checkpoint / STATE)
        self.optimizer.load_state_dict(state["optimizer"])
        self.algorithm.load_state_dict(state["algorithm"])
        self.rewards.load_state_dict(state["rewards"])
        self.held = [read_batch(record) for record in state["held"]]
        restore_random_states(state["random"][distributed.rank()])

    def _card(self) -> str:
        return str(model_card(self.config, self.algorithm_name, self.progress.last_record, self.progress.last_evaluation))


def run_algorithm(config_class: type[RLConfig], algorithm_class: type[Algorithm]) -> None:
    """What an algorithm's script does: read the configuration, then train, or print the plan."""
    config = parse(config_class)
    quiet_libraries()
    place_run(config)
    if config.dry_run:
        dry_run(config)
        return
    Trainer(config, algorithm_class(config)).run()
