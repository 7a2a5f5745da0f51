"""The loop: take a batch that the generator made, score it, train on it, publish the weights. One loop for every algorithm."""

import os
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed
from tqdm import tqdm
from transformers import AutoConfig

from async_rlhf import distributed
from async_rlhf.adapters import adapter, checkpoint_activations
from async_rlhf.algorithm import Algorithm, ScoredBatch, Tensors
from async_rlhf.batching import forward_rows, micro_batches, select, split_to
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
from async_rlhf.data import Encoder, PromptStream, load_prompts, quiet_libraries
from async_rlhf.dry_run import check_paths, dry_run, reward_columns
from async_rlhf.generation import Sampling
from async_rlhf.metrics import Metrics, Timers, append_json
from async_rlhf.model_card import check_push, model_card, push_checkpoint
from async_rlhf.models import (
    Policy,
    disable_dropout,
    end_token_ids,
    load_causal_lm,
    load_tokenizer,
    lora_config,
    save_model,
    token_logprobs,
    trained_dtype,
)
from async_rlhf.optimization import ModuleOptimizer, open_accelerator, sharding
from async_rlhf.pipeline import Evaluation, GenerationPipeline, Pacing
from async_rlhf.preemption import StopSignals, leave
from async_rlhf.reference import LocalReference
from async_rlhf.remote_reference import open_remote_reference
from async_rlhf.rewards import RewardContext, load_rewards
from async_rlhf.rollout import Prompt, Rollout, RolloutBatch, batch_record, read_batch, write_rollouts
from async_rlhf.runs import claim_folder, link_output, place_run, record_run, run_settings
from async_rlhf.scoring import Scorer
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
        self.facts = {
            "algorithm": self.algorithm_name,
            "processes": self.plan.processes,
            "sharding": sharding(self.accelerator),
            "mixed_precision": self.accelerator.mixed_precision,
        }
        checkpoint = distributed.broadcast(find_checkpoint(config, self.facts) if distributed.is_main() else None)
        self.reference = open_remote_reference(config, self.tokenizer, self.longest)  # None where it is no server's
        if distributed.is_main():
            self._open_folder()
        self._bind_to_cores()
        self._load_models()
        self.metrics, self.timers = Metrics(), Timers()
        self.progress, self.held = Progress(0, {0: 0}), []
        if checkpoint:
            self._restore(checkpoint)
        if distributed.is_main():  # from here on the folder holds a run
            if config.resume_from_checkpoint:
                rewind(self.output, self.progress)
            settled = {"sft_model_path": self._reference_path(), "completions_per_update": self.plan.completions}
            record_run(self.output, self.algorithm_name, asdict(config) | settled | self.facts)

    # -- set-up -------------------------------------------------------------------------------------------------------------

    def _reference_path(self) -> str:
        served = self.reference.path if self.reference else None
        return self.config.sft_model_path or served or self.config.model_name_or_path

    def _open_folder(self) -> None:
        earlier = run_settings(self.config.output_dir) if self.config.resume_from_checkpoint else {}
        if earlier:
            self.config.wandb_run_id = earlier["wandb_run_id"]  # one run in the trackers, too
        else:
            claim_folder(self.output, self.config.overwrite_output_dir)
        open_trackers(self.accelerator, asdict(self.config), resume=bool(earlier))

    def _check_model(self) -> None:
        model_config = AutoConfig.from_pretrained(self.config.model_name_or_path, trust_remote_code=self.config.trust_remote_code)
        context = getattr(model_config, "max_position_embeddings", None) or 1 << 30
        longest = max(map(len, self.prompts.ids))
        self.longest = longest + self.config.response_length
        require(
            self.longest <= context,
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
            checkpoint_activations(model) if self.peft else model.gradient_checkpointing_enable()
        if not (self.peft or self.reference):
            reference = load_causal_lm(config, self._reference_path())
            reference = Policy(reference.requires_grad_(False), config.share_prompts).eval().to(device)
            self.reference = LocalReference(reference, self.plan.prompts_per_forward)
        dtype = getattr(torch, config.torch_dtype, torch.float32)
        context = RewardContext(device, self.tokenizer, config.reward_batch_size, dtype, config.trust_remote_code)
        if getattr(config, "share_trunk", False):
            context = replace(context, trunk=model, policy=config)
        self.rewards = load_rewards(config.rewards, "reward", context)
        mixed_precision = self.accelerator.mixed_precision != "no"
        module = self.algorithm.module(Policy(model, config.share_prompts), self.rewards, mixed_precision).train()
        self.optimizer = ModuleOptimizer(self.accelerator, config, module, self.plan.optimizer_steps)
        if self.peft:
            policy = self.optimizer.unwrapped.policy
            self.reference = LocalReference(policy, self.plan.prompts_per_forward, partial(adapter, policy.model, None))
        prompts = {"train": self.prompts, "eval": self.eval_prompts}
        self.scorer = Scorer(config, self.rewards, self.reference, self.encoder, prompts, device)

    # -- the loop -----------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        config, main = self.config, distributed.is_main()  # asked now: at the end there are no ranks any more
        self.store = WeightStore(config.max_staleness + 1, config.snapshot_dir)
        self.pipeline = self._open_pipeline() if distributed.is_main() else None
        done, quiet = self.progress.updates, not distributed.is_main()
        self.bar = tqdm(total=self.plan.updates, initial=done, unit="update", disable=quiet, mininterval=1.0)
        saves, stopped = self.plan.saves(config.save_steps), False
        try:
            self._publish(done)
            if self.pipeline:
                self.pipeline.start()
            with StopSignals() as signals:
                for update in range(done, self.plan.updates):
                    with self.timers.time("update"):
                        batch = self._next_batch(update)
                        scored = self._score(self._deal(batch, update), update)
                        self._train(self.algorithm.make_batch(scored, self.metrics), scored, update)
                        self._publish(update + 1)
                    self._log(update, batch)
                    stopped = signals.asked() and update + 1 < self.plan.updates
                    if update + 1 in saves or stopped:
                        self._save(update + 1)
                    if stopped:
                        break
            if config.eval_steps and not stopped:
                self._next_batch(self.plan.updates)
                if main:
                    (self.output / f"checkpoint-{self.plan.updates}" / "README.md").write_text(self._card(), encoding="utf-8")
        finally:
            self.bar.close()
            if self.pipeline:
                self.pipeline.close()
            self.store.close()
            self.rewards.close()
            self.accelerator.end_training()
        if stopped:
            leave(self.output, self.progress.updates)
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
            score=self.scorer.score_in_pipeline if config.score_in_pipeline else None,
        )

    def _shares_model(self) -> bool:
        """A synchronous run's HF generator samples from the training model itself, which is idle then."""
        alone = distributed.world_size() == 1 and not self.peft
        return self.config.generator == "hf" and self.config.max_staleness == 0 and alone

    def _next_batch(self, done: int) -> RolloutBatch | None:
        """The next training batch, on every rank, or None when all `done` updates are; evaluations that come before it are scored and
        logged. A failure of the generator is raised on every rank."""
        while True:
            with self.timers.time("trainer_wait"):
                message = self._from_main(lambda: self.pipeline.get())
            if message.kind == "train":
                return message
            self._evaluate(message, done)
            if message.index == self.plan.updates:
                return None

    def _from_main(self, ask: Callable[[], Any]) -> Any:
        """What `ask` gives on the main process, on every rank. Its failure is raised on every rank."""
        received, failure = None, None
        if distributed.is_main():
            try:
                received = ask()
            except Exception as error:
                failure = error
        received, said = distributed.broadcast((received, failure and "".join(traceback.format_exception(failure))))
        if failure:
            raise failure
        if said:
            raise RuntimeError(f"failed on rank 0:\n{said}")
        return received

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
        behind = [self.optimizer.steps - self.progress.steps_at[group[0].versions[0]] for group in groups]
        with self.timers.time("score"):
            return self.scorer.score(update, groups, behind, self._evaluate_module, self.algorithm.kl_coef, self.metrics)

    @torch.no_grad()
    def _evaluate_module(self, tokens: Tensors, **options) -> Any:
        module = self.optimizer.unwrapped.eval()
        with self.timers.time("score"), self.accelerator.autocast():
            outputs = forward_rows(module, tokens, self.plan.prompts_per_forward, temperature=self.config.temperature, **options)
        module.train()
        return outputs

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
        self.optimizer.step(forwards, units, lambda module, rows: self.algorithm.loss(module, rows, self.metrics), self.algorithm.held)

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
        for name, seen in batch.observed.items():  # the same on every rank, which leaves the mean as it is
            self.metrics.observe(f"reward/{name}", seen)
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
        """Score held-out completions and log their mean. Trackers take no step twice and none that is past, so they get it at the updates
        `done`, with the snapshot's version beside it."""
        values, rows = self.scorer.evaluate(batch, self.output / "completions")
        self.progress.last_evaluation = values | {"eval/version": batch.version}
        if distributed.is_main():
            record = {"version": batch.version, "step": batch.version, "episode": batch.version * self.plan.completions, **values}
            append_json(self.output / "eval.jsonl", record)
            log_table(self.accelerator, "eval/completions", rows[:TABLE_ROWS], step=done)
        log(self.accelerator, {**values, "eval/version": batch.version}, done)

    def _save(self, updates: int) -> None:
        """A checkpoint, at the end of an update. It waits for the batches that were to be sampled with snapshots before this one."""
        self.progress.updates = updates
        self.held, self.progress.evaluated = self._from_main(lambda: self.pipeline.hold(updates + self.config.max_staleness))
        of_ranks = distributed.all_gather({"random": random_states(), "rewards": self.rewards.state_dict()})
        with new_folder(self.output / f"checkpoint-{updates}", self.config.save_total_limit) as folder:
            self.optimizer.save_shards(folder / STATE)
            if distributed.is_main():
                model, weights = plain_model(self.optimizer.model)
                beside = {name: plain_model(other) for name, other in self.algorithm.models(self.optimizer.unwrapped).items()}
                save_model(model, self.tokenizer, folder, weights, self._card(), beside)
                state = {"optimizer": self.optimizer.state_dict(), "algorithm": self.algorithm.state_dict()}
                state |= {"ranks": of_ranks, "held": [batch_record(batch) for batch in self.held]}
                save_state(folder, self.progress, state, self.output)

    def _restore(self, checkpoint: Path) -> None:
        self.progress, state = load_progress(checkpoint), load_state(checkpoint)
        self.optimizer.load_shards(checkpoint / STATE)
        self.optimizer.load_state_dict(state["optimizer"])
        self.algorithm.load_state_dict(state["algorithm"])
        self.held = [read_batch(record) for record in state["held"]]
        mine = state["ranks"][distributed.rank()]
        self.rewards.load_state_dict(mine["rewards"])
        restore_random_states(mine["random"])

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
