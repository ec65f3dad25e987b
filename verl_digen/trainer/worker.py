"""The training worker: one rank of the Trainer, and in colocated placement a replica as well."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transfer_queue as tq
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_name
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker

from verl_digen.config.deadlines import Deadlines
from verl_digen.config.digen import DigenConfig
from verl_digen.engine.tiles import SampleRow, cells_of_rank
from verl_digen.engine.tilesize import DryRun
from verl_digen.engine.transaction import StepRule, Transaction, TransactionError
from verl_digen.models.precision import constants
from verl_digen.platform.memory import peak_memory_bytes, reset_peak_memory, total_bytes
from verl_digen.rollout.replica import RolloutRole
from verl_digen.rollout.requests import Fragment, row_key
from verl_digen.sync.checksum import computed_with
from verl_digen.sync.ends import Place, WeightEnd, counted, summary
from verl_digen.trainer.device import DeviceOwner


@dataclass(frozen=True, kw_only=True)
class TrainFragment:
    """A scored fragment as the Trainer accumulates it.

    Attributes:
        samples: (uid, j).
        transitions: trained transitions K of each sample.
        advantages: by (uid, j).
        max_cells: of a tile.
        rotate: which rank takes the first, larger share, so that many small fragments balance out.
        last: it completes the logical batch.
        partition: of the TransferQueue.
        stale: samples of groups that were generated one version ago.
    """

    samples: tuple[tuple[str, int], ...]
    transitions: int
    advantages: dict[tuple[str, int], float]
    max_cells: int
    rotate: int
    last: bool
    partition: str = "train"
    stale: frozenset[tuple[str, int]] = frozenset()


class DiffusionActorWorker(RolloutRole, WeightEnd, TrainingWorker):
    """A rank of the training worker group.

    Args:
        config: veRL's worker config (model, engine, optimizer, checkpoint).
        digen: ``trainer.v1.digen``.
        rule: how cells are scored and weighed.
        with_reference: a KL to the initial policy is in the loss.
        seed: run seed.
        colocated: the rank is a replica too.
        bucket_bytes: of the weight channel.
    """

    def __init__(
        self,
        config: TrainingWorkerConfig,
        digen: DigenConfig,
        rule: StepRule,
        with_reference: bool,
        seed: int,
        colocated: bool,
        bucket_bytes: int,
    ):
        initialize_global_process_group_ray(
            # a rank waits in a collective for another one that uses its whole time up; torch's default is less
            timeout_second=Deadlines.of(digen.failure).collective.seconds,
            # veRL's own "cpu:gloo,<device>:<backend>" names the CPU twice on a CPU
            backend="cpu:gloo" if get_device_name() == "cpu" else None,
        )
        TrainingWorker.__init__(self, config)
        if digen.threads.trainer is not None:
            torch.set_num_threads(digen.threads.trainer)
        self._train_threads = torch.get_num_threads()
        self.digen, self.rule, self.seed, self.colocated = digen, rule, seed, colocated
        self.engine.configure(digen, with_reference=with_reference, seed=seed)
        self.transaction: Transaction | None = None
        self._commits = 0
        self._published: tuple[int, bool, int] = (-1, False, 0)
        self.init_end(bucket_bytes, Deadlines.of(digen.failure))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def init_model(self) -> dict[str, Any]:
        """Build the engine, and the replica in colocated placement."""
        self.use_device()
        self.engine.initialize()
        tq.init()
        if self.colocated:
            self.init_sampler(self.model_config, self.digen, self.seed, f"replica{dist.get_rank()}")
        self.device_owner = DeviceOwner(self.engine, self.sampler)
        computed = [computed_with(self.engine.computed, constants(self.engine.module))]
        if self.colocated:
            computed.append(self.sampler.computed())
        return {
            "lora": self.engine.lora_bound,
            "attention_backend": self.engine.family.attention_backend,
            "computed": computed,
        }

    # ---- transaction ---------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def begin(self, planned_cells: int, on_policy: bool, clamped: bool = True) -> None:
        """Open the transaction of a logical batch; see :class:`Transaction`."""
        if self.transaction is not None:
            raise TransactionError("a transaction is open already; commit or abort it first")
        reset_peak_memory()
        self.device_owner.begin()
        self._conditions: dict[str, tuple[dict, dict | None]] = {}
        self.transaction = Transaction(
            self.engine,
            self.rule,
            planned_cells=planned_cells,
            on_policy=on_policy,
            clamped=clamped,
            yields=self.device_owner.shared,
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def accumulate(self, fragment: TrainFragment) -> dict[str, Any]:
        """Fetch this rank's rows and run its tiles; returns what was done and when."""
        transaction = self._open()
        started = time.time()
        self.device_owner.train()
        ranks = dist.get_world_size()
        tiles = cells_of_rank(
            len(fragment.samples),
            fragment.transitions,
            rank=(dist.get_rank() - fragment.rotate) % ranks,
            ranks=ranks,
            max_cells=fragment.max_cells,
            tsp=self.rule.tsp,
        )
        needed = sorted({sample for tile in tiles for sample, _ in tile}) or [0]
        rows = dict(zip(needed, self._fetch([fragment.samples[i] for i in needed], fragment), strict=True))
        fetched = time.time()
        torch.set_num_threads(self._train_threads)  # the TransferQueue's client sets its own
        tile_times = transaction.accumulate(rows, tiles, idle_row=rows[needed[0]], last=fragment.last)
        if self.engine.family.runs_behind:  # the host's clock is ahead of the device's: share its time by cells
            self.engine.family.synchronize()
            tile_times = _by_cells(fetched, time.time(), [cells for _, _, cells in tile_times])
        ended = time.time()
        return {
            "fetch": fetched - started,
            "tiles": ended - fetched,
            "started": started,
            "fetched": fetched,
            "ended": ended,
            "rank": dist.get_rank(),
            "rounds": len(tiles),
            "tile_times": tile_times,
            "too_large": transaction.too_large,
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def commit(self, scale: float = 1.0) -> dict[str, float]:
        """Step the optimizer once and close the transaction."""
        transaction = self._open()
        started = time.time()
        self.device_owner.train()
        try:
            cells = torch.tensor(transaction.cells, dtype=torch.int64, device=self.engine.device)
            dist.all_reduce(cells)
            metrics = transaction.commit(int(cells), scale)
            self._commits += 1
        finally:
            self._close()
        self.engine.family.synchronize()
        ended = time.time()
        metrics |= {"commit_s": ended - started, "commit_started": started, "commit_ended": ended}
        metrics["peak_memory_gb"] = peak_memory_bytes() / 2**30
        return metrics

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def abort(self) -> None:
        """Close the transaction, if one is open, without a trace."""
        if self.transaction is not None:
            try:
                self.device_owner.train()
                self.transaction.abort()
            finally:
                self._close()

    # ---- tile size -----------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def find_tile_size(self, largest: int, cond: dict, negative: dict | None) -> int:
        """Cells of a tile, at most ``largest``, by a dry run with the prompt tensors given; see :class:`DryRun`."""
        family, sampling = self.engine.family, self.digen.sampling
        asked = (sampling.height, sampling.width, sampling.num_frames)
        size = [a if a is not None else d for a, d in zip(asked, family.default_size(), strict=True)]
        self.device_owner.begin()
        try:
            dry_run = DryRun(
                self.engine,
                self.rule,
                self.digen.tsp,
                latent_shape=family.latent_shape(*size),
                cond=cond,
                negative=negative,
                total=total_bytes(),
            )
            return dry_run.find(largest)
        finally:
            self.device_owner.end()

    # ---- as a replica (colocated) --------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def generate(self, fragment: Fragment):
        """See :meth:`RolloutRole.generate`."""
        self.device_owner.generate()
        return super().generate(fragment)

    def _open(self) -> Transaction:
        if self.transaction is None:
            raise TransactionError("no transaction is open; call begin first")
        return self.transaction

    def _close(self) -> None:
        self.transaction = None
        self.device_owner.end()

    def _fetch(self, samples, fragment: TrainFragment) -> list[SampleRow]:
        uids = list(dict.fromkeys(uid for uid, _ in samples))
        self._fetch_conditions([uid for uid in uids if uid not in self._conditions], fragment.partition)
        data = tq.kv_batch_get(
            keys=[row_key(uid, j) for uid, j in samples],
            partition_id=fragment.partition,
            select_fields=["latents", "sigmas", "rollout_log_probs", "starts"],
        )
        columns = {name: data[name].unbind(0) for name in ("latents", "sigmas", "rollout_log_probs", "starts")}
        return [
            SampleRow(
                uid=uid,
                j=j,
                latents=columns["latents"][i],
                sigmas=columns["sigmas"][i],
                starts=tuple(columns["starts"][i].tolist()),
                log_probs=columns["rollout_log_probs"][i],
                advantage=fragment.advantages[(uid, j)],
                stale=(uid, j) in fragment.stale,
                cond=self._conditions[uid][0],
                negative=self._conditions[uid][1],
            )
            for i, (uid, j) in enumerate(samples)
        ]

    def _fetch_conditions(self, uids: list[str], partition: str) -> None:
        """Prompt tensors of groups that this logical batch has not met yet."""
        if not uids:
            return
        data = tq.kv_batch_get(keys=uids, partition_id=partition)
        columns = {name: data[name].unbind(0) for name in data.keys()}  # noqa: SIM118 - a TensorDict is no dict
        for i, uid in enumerate(uids):
            cond = {n.partition(".")[2]: c[i] for n, c in columns.items() if n.startswith("cond.")}
            negative = {n.partition(".")[2]: c[i] for n, c in columns.items() if n.startswith("negative.")}
            self._conditions[uid] = (cond, negative or None)

    # ---- weights -------------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def publish_weights(self, global_steps: int, averaged: bool = False, place: Place | None = None) -> dict[str, Any]:
        """Give version ``global_steps`` to replicas: to the own one when colocated, else through a channel.

        Args:
            averaged: publish the EMA weights.
            place: of rank 0 in the channel.

        Returns:
            checksum and number of the tensors published; the own replica's acknowledgement when colocated.
        """
        if self.transaction is not None:
            return self._republish(global_steps, averaged, place)
        version, _, commits = self._published
        if global_steps == version and commits != self._commits:
            raise TransactionError(
                f"version {version} cannot be published again: {self._commits - commits} commit(s) have changed the "
                "weights since, and no replica holds them any more"
            )
        context = self.engine.averaged_weights() if averaged else nullcontext()
        with self.engine.eval_mode(), context, torch.no_grad():
            sent = self._publish(global_steps, place)
        self._published = (global_steps, averaged, self._commits)
        return sent

    def _republish(self, version: int, averaged: bool, place: Place | None) -> dict[str, Any]:
        """Within an open transaction the weights are still those of the last publish, unless a commit came between."""
        if self._published != (version, averaged, self._commits):
            raise TransactionError(
                f"version {version} cannot be published again: {self._commits - self._published[2]} commit(s) have "
                "changed the weights since. When no replica holds them any more, they can be had only with one logical "
                "batch per step (actor_rollout_ref.actor.ppo_mini_batch_size = data.train_batch_size)"
            )
        with self.engine.sharded(), torch.no_grad():
            return self._publish(version, place)

    def _publish(self, version: int, place: Place | None) -> dict[str, Any]:
        sums: list[int] = []
        tensors, _ = self.engine.get_per_tensor_param()
        if self.colocated:
            checksum, count = self.sampler.load_weights(counted(tensors, sums), version)
            ack = {"replica": self._replica_name, "version": version, "checksum": checksum, "tensors": count}
            return {"ack": ack, **summary(sums, version)}
        try:
            if dist.get_rank() == 0:
                return self.send(tensors, version, place)
        finally:
            for _ in tensors:  # every rank takes part in gathering each tensor, whatever became of the transfer
                continue
        return {}


def _by_cells(started: float, ended: float, cells: list[int]) -> list[tuple[float, float, int]]:
    """Start, end and cells of tiles that together took from ``started`` to ``ended``."""
    weights = [max(count, 1) for count in cells]
    edges = [started]
    for weight in weights:
        edges.append(edges[-1] + (ended - started) * weight / sum(weights))
    return list(zip(edges, edges[1:], cells, strict=False))
