"""Starting the processes of both pools, and loading the model on both sides."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import ray
from omegaconf import DictConfig
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.single_controller.ray.base import RayResourcePool
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import TrainingWorkerConfig

from verl_digen.config.model import DiffusionModelConfig
from verl_digen.config.plan import RunPlan
from verl_digen.data.prompts import PromptDataset
from verl_digen.engine.tilesize import TileSize
from verl_digen.engine.transaction import StepRule
from verl_digen.rollout.fleet import Fleet
from verl_digen.rollout.replica import DiffusersReplica, DiffusionRolloutWorker
from verl_digen.sync.calls import results
from verl_digen.sync.ends import CONCURRENCY
from verl_digen.sync.publisher import WeightPublisher
from verl_digen.trainer.pools import ROLLOUT_POOL, TRAINER_POOL
from verl_digen.trainer.worker import DiffusionActorWorker
from verl_digen.trainer.workgroup import TrainerGroup


@dataclass
class Workers:
    """Processes of both pools.

    Attributes:
        trainer: veRL's group of the Trainer's ranks.
        rollout: of the replicas; None when they live in the Trainer's processes.
        rollout_class: what a replica's process is made of.
        rollout_pool: where they are.
    """

    trainer: RayWorkerGroup
    rollout: RayWorkerGroup | None = None
    rollout_class: RayClassWithInitArgs | None = None
    rollout_pool: RayResourcePool | None = None


class ReplicaProcesses:
    """Starts processes of replicas again.

    Args:
        worker_class: see :class:`Workers`.
        device: veRL's name of the device.
    """

    def __init__(self, worker_class: RayClassWithInitArgs, device: str):
        self.worker_class, self.device = worker_class, device

    def placed(self, replica: DiffusersReplica) -> bool:
        """Whether the replica's place is on a node that is there."""
        return replica.placed

    def start(self, replica: DiffusersReplica) -> ray.ObjectRef:
        """End the replica's process, start a new one, and return the reference of its loading the model."""
        replica.respawn(self.worker_class, self.device)
        return replica.workers[0].init_model.remote(replica.name)


def start_workers(
    config: DictConfig, plan: RunPlan, model: DiffusionModelConfig, rule: StepRule, pools: dict[str, RayResourcePool]
) -> Workers:
    """Start all processes of both pools; nothing is loaded yet."""
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    disaggregated = plan.digen.placement == "disaggregated"
    bucket = config.actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes << 20
    common = {"digen": plan.digen, "seed": plan.seed, "bucket_bytes": bucket}
    actor_class = RayClassWithInitArgs(
        cls=ray.remote(concurrency_groups=CONCURRENCY)(DiffusionActorWorker),
        config=TrainingWorkerConfig(
            model_type="diffusion_model",
            model_config=model,
            engine_config=actor.engine,
            optimizer_config=actor.optim,
            checkpoint_config=actor.checkpoint,
            profiler_config=None,
        ),
        rule=rule,
        with_reference=plan.with_reference,
        colocated=not disaggregated,
        **common,
    )

    def group(pool: RayResourcePool, worker_class: RayClassWithInitArgs) -> RayWorkerGroup:
        return RayWorkerGroup(
            resource_pool=pool, ray_cls_with_init=worker_class, bin_pack=False, device_name=config.trainer.device
        )

    workers = Workers(trainer=group(pools[TRAINER_POOL], actor_class))
    if disaggregated:
        replica = ray.remote(concurrency_groups=CONCURRENCY)(DiffusionRolloutWorker)
        workers.rollout_pool = pools[ROLLOUT_POOL]
        workers.rollout_class = RayClassWithInitArgs(cls=replica, model=model, **common)
        workers.rollout = group(workers.rollout_pool, workers.rollout_class)
    return workers


def load_models(config: DictConfig, plan: RunPlan, workers: Workers, ranks: TrainerGroup) -> Fleet:
    """Load both sides at the same time and tie them together; returns the replicas, which hold no version yet.

    Raises:
        ValueError: see :func:`check_loaded`.
        TimeoutError: loading took too long.
    """
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    replicas = [
        DiffusersReplica(replica_rank=rank, config=rollout, model_config=model, gpus_per_node=rollout.n_gpus_per_node)
        for rank in range(plan.replicas)
    ]
    loading = ranks.call("init_model")
    if workers.rollout is not None:
        loading += [w.init_model.remote(r.name) for w, r in zip(workers.rollout.workers, replicas, strict=True)]
    check_loaded(plan, model.attention_backend, results(loading, "loading the model", plan.deadlines.load))
    asyncio.run(_launch(replicas, workers))
    processes = None
    if workers.rollout is not None:
        processes = ReplicaProcesses(workers.rollout_class, config.trainer.device)
    return Fleet(
        replicas,
        WeightPublisher(ranks, colocated=processes is None, deadlines=plan.deadlines),
        processes=processes,
        deadlines=plan.deadlines,
        max_retries=plan.digen.failure.max_retries,
    )


async def _launch(replicas: list[DiffusersReplica], workers: Workers) -> None:
    for replica in replicas:
        if workers.rollout is None:
            await replica.init_hybrid(workers.trainer)
        else:
            await replica.init_from_group(workers.rollout, workers.rollout_pool)


def tile_size(plan: RunPlan, folder: str, shape: dict[str, Any], model: DiffusionModelConfig) -> TileSize:
    """What is known of the tile size before anything is run.

    Args:
        folder: ``trainer.default_local_dir``.
        shape: how the model samples (``effective_parameters``).
        model: ``actor_rollout_ref.model``.
    """
    rest = (model.path, model.lora_rank, model.enable_gradient_checkpointing, plan.with_reference, plan.trainer_ranks)
    key = json.dumps([shape, *rest, plan.digen.accelerator_type.trainer], sort_keys=True, default=str)
    return TileSize(folder, key, plan.largest_tile)


def find_tile_size(
    size: TileSize, plan: RunPlan, ranks: TrainerGroup, fleet: Fleet, prompts: PromptDataset, *, limited: bool
) -> None:
    """A dry run, unless the size is known or there is nothing to find.

    Args:
        limited: devices have a memory of their own; a CPU's is shared and has no limit of ours.
    """
    if size.known or not (limited or plan.digen.tsp.auto):
        return
    longest = max(prompts, key=lambda row: len(row["prompt"]))
    texts = longest["prompt"], longest["negative_prompt"] or ""
    if plan.digen.placement == "colocated":
        encoding = ranks.first("prompt_tensors", *texts)
    else:
        encoding = fleet.replicas[0].workers[0].prompt_tensors.remote(*texts)
    (tensors,) = results([encoding], "encoding a prompt for the dry run", plan.deadlines.generate)
    trying = ranks.call("find_tile_size", size.cells, *tensors)
    size.found(min(ranks.get(trying, "the dry run that finds the tile size", plan.deadlines.train)))


def check_loaded(plan: RunPlan, attention_backend: str, loaded: list[dict[str, Any]]) -> None:
    """Both sides must have bound the same number of adapter tensors, use the same attention backend, and compute with
    the same dtypes and the same constants.

    Args:
        loaded: ``lora``, ``attention_backend`` and ``computed`` (of each model there) of each worker.

    Raises:
        ValueError: they differ from each other or from what was asked for.
    """
    bound = [entry["lora"] for entry in loaded]
    if len(set(bound)) != 1 or (plan.lora_rank and 0 in bound):
        raise ValueError(
            f"actor_rollout_ref.model.lora_rank={plan.lora_rank}: adapter tensors bound by the workers are "
            f"{bound}; they must be equal and more than 0"
        )
    backends = {entry["attention_backend"] for entry in loaded}
    if backends != {attention_backend}:
        raise ValueError(
            f"actor_rollout_ref.model.attention_backend={attention_backend}: the workers use "
            f"{sorted(map(str, backends))}"
        )
    models = [(rank, model) for rank, entry in enumerate(loaded) for model in entry["computed"]]
    for rank, model in models[1:]:
        _check_same(models[0][1], model, rank)


def _check_same(first: dict[str, str], other: dict[str, str], rank: int) -> None:
    differ = sorted(name for name in first.keys() | other.keys() if first.get(name) != other.get(name))
    if differ:
        examples = "; ".join(f"{name}: {first.get(name)} and {other.get(name)}" for name in differ[:3])
        raise ValueError(
            f"worker 0 and worker {rank} compute with other dtypes or constants in {len(differ)} of "
            f"{len(first.keys() | other.keys())} tensors ({examples}), so equal weights would give unlike velocities; "
            "actor_rollout_ref.model.path must hold the same files on every node"
        )
