"""The trainer ``digen``: veRL's own loop, with a diffusion rollout and transactions in place of the text parts.

``fit``, epochs, validation times, checkpoint times and logging are veRL's. A step is: prompt groups of the step →
rollout manager → rewards → advantages → transaction(s) → publish. Version k is what is published after step k; step
k + 1 is generated under it.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import DictConfig, open_dict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.debug import marked_timer
from verl.utils.tracking import Tracking

from verl_digen.config.paths import expand_home
from verl_digen.config.plan import RunPlan, prompt_files, resolve_plan, validates
from verl_digen.config.unread import check_unread
from verl_digen.data.prompts import PromptDataset, batch_indices, group_uid
from verl_digen.diffusion.losses import FlowGRPOConfig
from verl_digen.engine.optimizer import check_optimizer
from verl_digen.engine.tilesize import TileSize
from verl_digen.engine.transaction import StepRule
from verl_digen.models.adapter import check_adapter
from verl_digen.models.family import Guidance, family_for
from verl_digen.rollout.manager import RolloutPool
from verl_digen.rollout.requests import TRAIN, PromptGroup, row_key
from verl_digen.schedule.measure import Measured
from verl_digen.schedule.tcss import StaleLedger
from verl_digen.sync.publisher import PublishError
from verl_digen.trainer import metrics as digen_metrics
from verl_digen.trainer.about import file_logger_path, write_about
from verl_digen.trainer.check import print_plan
from verl_digen.trainer.outputs import Outputs
from verl_digen.trainer.pools import REWARD_POOL, ROLLOUT_POOL, TRAINER_POOL, DigenResourcePoolManager
from verl_digen.trainer.resume import ENGINE_FOLDER, find_checkpoint, run_state, save_run
from verl_digen.trainer.rewards import DiffusionRewardLoopManager, build_rewards
from verl_digen.trainer.runfolder import lock_folder, put_log_back, set_log_aside
from verl_digen.trainer.startup import find_tile_size, load_models, start_workers, tile_size
from verl_digen.trainer.step import StepOutcome, TrainingStep
from verl_digen.trainer.timeline import StepTimes, bubble_metrics, learn, step_trace
from verl_digen.trainer.tracefiles import write_step_trace
from verl_digen.trainer.transferqueue import QueueWatch, own_controller
from verl_digen.trainer.validate import Validator, dump_samples, load_metrics
from verl_digen.trainer.workgroup import TrainerGroup

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))


class DigenTrainer(PPOTrainer):
    """See the module's docstring.

    Raises:
        ValueError: at construction, before any device is taken: see :func:`verl_digen.config.plan.resolve_plan`.
    """

    def __init__(self, config: DictConfig):
        if ray.is_initialized():  # first: main_ppo would end the queue of another run after any error further down
            self.queue = own_controller()
        check_unread(config)
        expand_home(config)
        self.plan: RunPlan = resolve_plan(config)
        super().__init__(config)
        self.use_reference_policy = False  # the reference lives in the training engine
        self.outcome: StepOutcome | None = None
        self._sync_metrics: dict[str, float] = {}
        self._times = StepTimes(started=time.time())
        self.measured = Measured()
        self.outputs = Outputs()

    @property
    def logger(self) -> Tracking:
        """veRL's loggers, made in ``fit``; one that fails does not end the run."""
        return self._logger

    @logger.setter
    def logger(self, tracking: Tracking) -> None:
        self._logger = self.outputs.guard(tracking)
        with self.outputs.attempt("keeping the metrics of the steps before"):
            put_log_back(file_logger_path(self.config), tracking.logger.get("file"))

    def _build_replay_buffer(self) -> None:
        """Groups are assembled by the rollout manager, which knows their samples; there is no replay buffer."""
        return None

    # ---- building ------------------------------------------------------------------------------------------

    def check(self) -> Path | None:
        """All that can be wrong before a device is taken: prompts, model folder, rewards, checkpoint. Starts nothing.

        Returns:
            The checkpoint to go on from, or None.

        Raises:
            ValueError: with the option to change.
        """
        self._init_dataloader()
        self._check_model()
        self.validation_metrics = load_metrics(self.plan.digen.validation.metrics)
        build_rewards(self.config)  # an unknown reward or a missing file is an error here already
        return self.find_checkpoint()

    def _setup(self) -> None:
        self._init_tokenizer()
        self._init_dump_executor()
        self.check()
        lock_folder(self.config.trainer.default_local_dir)
        resumed = self.find_checkpoint()  # again: a run that had the folder may have ended meanwhile
        set_log_aside(file_logger_path(self.config), None if resumed is None else self.global_steps)
        rows = self.plan_rows()
        print_plan(rows)
        write_about(self, rows)
        self._init_resource_pool_mgr()
        self.resource_pool_manager.create_resource_pool()
        pools = self.resource_pool_manager.resource_pool_dict
        self.workers = start_workers(self.config, self.plan, self.model_config, self.step_rule(), pools)
        self.ranks = TrainerGroup(self.workers.trainer.workers)
        self.reward_loop_manager = DiffusionRewardLoopManager(config=self.config, rm_resource_pool=None)
        self.fleet = load_models(self.config, self.plan, self.workers, self.ranks)
        self.llm_server_manager = self.teacher_model_manager = None
        if resumed is not None:
            self.load_engines(resumed)
        self.tile_size = self._tile_size()
        self._find_tile_size()

    def _tile_size(self) -> TileSize:
        folder = self.config.trainer.default_local_dir
        return tile_size(self.plan, folder, self.expected_sampling["train"], self.model_config)

    def _find_tile_size(self) -> None:
        limited = self.config.trainer.device != "cpu"
        find_tile_size(self.tile_size, self.plan, self.ranks, self.fleet, self.train_dataset, limited=limited)

    def _init_tokenizer(self) -> None:
        """Prompts are tokenised by the model family in the replicas."""
        self.tokenizer = self.processor = None

    def _init_dataloader(self) -> None:
        self.train_dataset = PromptDataset(prompt_files(self.config, "train_files"))
        self.val_dataset = PromptDataset(prompt_files(self.config, "val_files")) if validates(self.config) else []
        self.steps_per_epoch = len(self.train_dataset) // self.plan.prompts
        batch_indices(self.plan.seed, len(self.train_dataset), self.plan.prompts, step=1)  # refuses a batch too large
        total = self.config.trainer.total_training_steps
        self.total_training_steps = (
            total if total is not None else self.steps_per_epoch * self.config.trainer.total_epochs
        )
        if self.total_training_steps > self.steps_per_epoch * self.config.trainer.total_epochs:
            raise ValueError(
                f"trainer.total_training_steps={self.total_training_steps} needs more than trainer.total_epochs="
                f"{self.config.trainer.total_epochs} epochs of {self.steps_per_epoch} steps; raise it to "
                f"{-(-self.total_training_steps // self.steps_per_epoch)}"
            )
        updates = self.total_training_steps * self.plan.logical_batches * self.plan.epochs
        check_optimizer(omega_conf_to_dataclass(self.config.actor_rollout_ref.actor.optim), updates)
        with open_dict(self.config):
            self.config.actor_rollout_ref.actor.optim.total_training_steps = updates

    def _check_model(self) -> None:
        """Model parts, size, guidance and schedule, from the folder's JSON files; no weights are read."""
        model, digen = self.config.actor_rollout_ref.model, self.plan.digen
        self.model_config = omega_conf_to_dataclass(model)
        family_cls = family_for(self.model_config.path, model.family)
        family_cls.check_parts(self.model_config.path)
        if model.lora_adapter_path:
            check_adapter(model.lora_adapter_path, rank=model.lora_rank, alpha=model.lora_alpha)
        import torch

        family = family_cls(self.model_config.path, dtype=getattr(torch, model.dtype))
        family.attention_backend = model.attention_backend
        family.shift = digen.sampling.shift
        sampling, validation = digen.sampling, digen.validation
        size = [
            asked if asked is not None else default
            for asked, default in zip(
                (sampling.height, sampling.width, sampling.num_frames), family.default_size(), strict=True
            )
        ]
        self.guidance = Guidance.of(sampling)
        val_guidance = Guidance.of(sampling, validation.guidance_scale)
        self.expected_sampling = {
            "train": family.effective_parameters(sampling.num_steps, *size, guidance=self.guidance),
            "validation": family.effective_parameters(
                validation.num_steps or sampling.num_steps, *size, guidance=val_guidance
            ),
        }

    def plan_rows(self) -> list[tuple[str, str]]:
        """The resolved plan as (what, value), after :meth:`check`."""
        sampling = self.expected_sampling["train"]
        return [
            ("model", f"{self.model_config.path} ({sampling['family']}, {sampling['dtype']})"),
            (
                "sampling",
                f"{sampling['num_steps']} steps, {self.plan.digen.sampling.kind} eta {self.plan.digen.sampling.eta:g}, "
                f"{sampling['height']}x{sampling['width']}x{sampling['num_frames']}, "
                f"guidance {sampling['guidance_scale']:g}",
            ),
            *self.plan.rows(),
        ]

    def _init_resource_pool_mgr(self) -> None:
        trainer, rollout = self.config.trainer, self.config.actor_rollout_ref.rollout
        types = self.plan.digen.accelerator_type
        spec = {TRAINER_POOL: [trainer.n_gpus_per_node] * trainer.nnodes}
        if self.disaggregated:
            spec[ROLLOUT_POOL] = [rollout.n_gpus_per_node] * rollout.nnodes
        devices = self.plan.digen.reward_workers.num_gpus
        self.mapping = {Role.ActorRollout: TRAINER_POOL}
        self.resource_pool_manager = DigenResourcePoolManager(
            resource_pool_spec=spec,
            mapping=self.mapping,
            max_colocate_count=1,
            accelerator_types={TRAINER_POOL: types.trainer, ROLLOUT_POOL: types.rollout, REWARD_POOL: types.reward},
            reward_devices=[devices] * self.config.reward.num_workers if devices else [],
        )

    @property
    def disaggregated(self) -> bool:
        return self.plan.digen.placement == "disaggregated"

    def step_rule(self) -> StepRule:
        """How the plan scores and weighs cells."""
        plan, digen = self.plan, self.plan.digen
        return StepRule(
            kind=digen.sampling.kind,
            eta=digen.sampling.eta,
            guidance=self.guidance,
            loss=plan.loss,
            loss_config=FlowGRPOConfig(
                clip_low=plan.clip_low,
                clip_high=plan.clip_high,
                adv_max=digen.algorithm.adv_max,
                kl_beta=plan.kl_beta,
                kl_form=digen.algorithm.kl_form,
            ),
            tsp=digen.tsp.enable,
            reduce=digen.tsp.reduce,
            correction=digen.tcss.correction,
            weight_cap=digen.tcss.weight_cap,
            split_by_staleness=digen.tcss.enable,
            num_steps=digen.sampling.num_steps,
        )

    def get_llm_client(self) -> RolloutPool:
        """What the rollout manager is built with."""
        return RolloutPool(
            replicas=self.fleet.replicas,
            replace=self.fleet.replace if self.disaggregated else None,
            expected=self.expected_sampling,
            reward_restart=self.reward_loop_manager.restart,
            ledger=StaleLedger(self.plan.prompts, self.plan.max_stale_ratio, published=self.global_steps),
        )

    # ---- the loop's hooks ----------------------------------------------------------------------------------

    def fit(self, agent_loop_manager) -> None:
        with QueueWatch.of(self.queue, self.plan.deadlines.transfer.seconds):
            super().fit(agent_loop_manager)

    def on_init_end(self) -> None:
        self._sync_metrics = self._publish()

    def step(self, metrics: dict, timing_raw: dict) -> KVBatchMeta:
        """One training step under the current version; see :mod:`verl_digen.trainer.step`."""
        self._times = StepTimes(started=time.time())
        groups, ahead = self._groups_of_step(self.global_steps), []
        if self.plan.digen.tcss.enable and self.global_steps < self.total_training_steps:
            ahead = self._groups_of_step(self.global_steps + 1)
        runner = TrainingStep(self.plan, self.ranks, self.agent_loop_manager, self.tile_size, self.measured)
        self.outcome = runner.run(
            groups,
            version=self.fleet.version,
            training_step=self.global_steps,
            timing_raw=timing_raw,
            ahead=ahead,
            keep_pixels=self._pixels_to_keep(groups + ahead),
        )
        keys = [row_key(uid, j) for group in groups for uid, j in group.samples] + [group.uid for group in groups]
        return KVBatchMeta(partition_id=TRAIN, keys=keys, tags=[{} for _ in keys])

    def _reissue_inflight_prompts(self, partition_id: str = TRAIN) -> int:
        """Drop the rows of a step that was not finished: it is generated anew, with the same bits, from its number."""
        rows = list((tq.kv_list(partition_id) or {}).get(partition_id, {}))
        if rows:
            tq.kv_clear(keys=rows, partition_id=partition_id)
        return 0

    def on_step_end(self) -> None:
        started = time.time()
        with marked_timer("update_weights", self.timing_raw):
            self._sync_metrics = self._publish()
        self._times.publishes.append((started, time.time()))
        self._times.ended = time.time()  # validation comes after it
        learning = self.outcome.commits[-1]
        if not self._sync_metrics["sync/changed"] and learning["lr"] > 0 and learning["grad_norm"] > 0:
            raise PublishError(
                f"step {self.global_steps} committed with gradient norm {learning['grad_norm']:g} and learning rate "
                f"{learning['lr']:g}, but the published weights did not change"
            )

    def on_sample_end(self) -> None:
        """veRL's sampling phase has no counterpart here."""

    def on_validate_begin(self) -> None:
        if self.plan.digen.ema.validate:
            self._publish(averaged=True)

    def on_validate_end(self) -> None:
        if self.plan.digen.ema.validate:
            self._publish()

    def _publish(self, averaged: bool = False) -> dict[str, float]:
        """Publish the current weights, between fragments; returns what the publisher says of it."""
        manager = getattr(self, "agent_loop_manager", None)  # built after the first publish
        between = manager.publishing(self.global_steps, averaged=averaged) if manager else nullcontext()
        with between:
            return self.fleet.publish(self.global_steps, averaged)

    def _groups_of_step(self, step: int) -> list[PromptGroup]:
        epoch, places = batch_indices(
            self.plan.seed,
            len(self.train_dataset),
            self.plan.prompts,
            step,
            shuffle=self.config.data.get("shuffle", True),
        )
        return [
            prompt_group(self.train_dataset[index], group_uid(self.plan.seed, epoch, position), self.plan.n, TRAIN)
            for position, index in places
        ]

    def _pixels_to_keep(self, groups: list[PromptGroup]) -> set:
        if not self.config.trainer.get("rollout_data_dir", None):
            return set()
        return {sample for group in groups for sample in group.samples}

    # ---- validation, metrics, dumps, checkpoints -----------------------------------------------------------

    def _validate(self) -> dict[str, float]:
        return Validator(self).run()

    def _compute_metrics(self, batch, metrics, timing_raw, global_steps, epoch) -> None:
        activity = self.agent_loop_manager.take_activity()
        trace = step_trace(self.plan, self.outcome, activity, self._times)
        learn(self.measured, self.plan, self.outcome, activity, self._times)
        metrics.update(
            digen_metrics.step_metrics(
                self.outcome,
                self.plan,
                activity,
                timing_raw,
                step=global_steps,
                epoch=epoch,
            )
        )
        metrics.update(bubble_metrics(trace))
        every = self.plan.digen.trace.every
        if every and global_steps % every == 0:
            with self.outputs.attempt(f"writing the timeline of step {global_steps}"):
                write_step_trace(self, trace, global_steps)
        metrics.update(self._sync_metrics)
        metrics.update(self.outputs.metrics())

    def _log_rollout_data(self, batch, timing_raw, rollout_data_dir) -> None:
        with marked_timer("dump_rollout_generations", timing_raw):
            with self.outputs.attempt(f"dumping the samples of step {self.global_steps} to {rollout_data_dir}"):
                dump_samples(self, self.outcome.groups, rollout_data_dir)
            for sample in self.outcome.samples:
                self.agent_loop_manager.pixels.pop((sample.uid, sample.j), None)

    def _run_state(self) -> dict[str, Any]:
        shuffle = bool(self.config.data.get("shuffle", True))
        return run_state(self.plan, self.train_dataset, shuffle=shuffle, step=self.global_steps)

    def _save_checkpoint(self) -> None:
        def write(folder: Path) -> None:
            writing = self.ranks.call("save_checkpoint", str(folder), None, self.global_steps)
            self.ranks.get(writing, f"writing the checkpoint of step {self.global_steps}", self.plan.deadlines.load)

        save_run(self.config.trainer, self._run_state(), write)

    def find_checkpoint(self) -> Path | None:
        """The checkpoint to go on from, or None; sets ``global_steps``."""
        self.global_steps = 0
        found = find_checkpoint(self.config.trainer, self._run_state())
        if found is None:
            return None
        folder, self.global_steps = found
        return folder

    def load_engines(self, folder: Path) -> None:
        """Load weights, optimizer and schedule of a checkpoint into the training ranks."""
        loading = self.ranks.call("load_checkpoint", local_path=str(folder / ENGINE_FOLDER))
        self.ranks.get(loading, f"loading {folder}", self.plan.deadlines.load)
        logger.info("resumed from %s at step %d", folder, self.global_steps)


def prompt_group(row: dict[str, Any], uid: str, n: int, partition: str) -> PromptGroup:
    """A prompt row as the group that is generated for it."""
    return PromptGroup(
        uid=uid,
        n=n,
        prompt=row["prompt"],
        negative_prompt=row["negative_prompt"] or "",
        ground_truth=row["ground_truth"],
        data_source=row["data_source"],
        extra_info=row["extra_info"],
        partition=partition,
    )
