"""Starting the processes of both pools, and loading the model on both sides."""

from __future__ import annotations

from typing import Any

import ray
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.ray_utils import auto_await
from verl.workers.config import TrainingWorkerConfig

from verl_digen.config.plan import RunPlan
from verl_digen.rollout.replica import DiffusersReplica, DiffusionRolloutWorker
from verl_digen.sync.calls import results
from verl_digen.sync.publisher import WeightPublisher
from verl_digen.trainer.pools import ROLLOUT_POOL, TRAINER_POOL
from verl_digen.trainer.worker import DiffusionActorWorker
from verl_digen.trainer.workgroup import TrainerGroup


def start_workers(trainer) -> None:
    """Start all processes of both pools; nothing is loaded yet. Sets ``actor_rollout_wg`` and ``rollout_wg``."""
    actor = omega_conf_to_dataclass(trainer.config.actor_rollout_ref.actor)
    plan, digen = trainer.plan, trainer.plan.digen
    bucket = trainer.config.actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes << 20
    device = trainer.config.trainer.device
    actor_class = RayClassWithInitArgs(
        cls=ray.remote(DiffusionActorWorker),
        config=TrainingWorkerConfig(
            model_type="diffusion_model",
            model_config=trainer.model_config,
            engine_config=actor.engine,
            optimizer_config=actor.optim,
            checkpoint_config=actor.checkpoint,
            profiler_config=None,
        ),
        digen=digen,
        rule=trainer.step_rule(),
        with_reference=plan.with_reference,
        seed=plan.seed,
        colocated=not trainer.disaggregated,
        bucket_bytes=bucket,
    )
    pools = trainer.resource_pool_manager.resource_pool_dict
    trainer.actor_rollout_wg = RayWorkerGroup(
        resource_pool=pools[TRAINER_POOL], ray_cls_with_init=actor_class, bin_pack=False, device_name=device
    )
    trainer.ranks = TrainerGroup(trainer.actor_rollout_wg.workers)
    if trainer.disaggregated:
        trainer.rollout_class = RayClassWithInitArgs(
            cls=ray.remote(DiffusionRolloutWorker),
            model=trainer.model_config,
            digen=digen,
            seed=plan.seed,
            bucket_bytes=bucket,
        )
        trainer.rollout_wg = RayWorkerGroup(
            resource_pool=pools[ROLLOUT_POOL],
            ray_cls_with_init=trainer.rollout_class,
            bin_pack=False,
            device_name=device,
        )


def init_models(trainer) -> None:
    """Load both sides at the same time and tie them together. Sets ``replicas`` and ``checkpoint_manager``."""
    rollout, plan = trainer.config.actor_rollout_ref.rollout, trainer.plan
    trainer.replicas = [
        DiffusersReplica(
            replica_rank=rank,
            config=rollout,
            model_config=trainer.config.actor_rollout_ref.model,
            gpus_per_node=rollout.n_gpus_per_node,
        )
        for rank in range(plan.replicas)
    ]
    loading = trainer.ranks.call("init_model")
    if trainer.disaggregated:
        loading = loading + [
            worker.init_model.remote(f"replica{rank}") for rank, worker in enumerate(trainer.rollout_wg.workers)
        ]
    loaded = results(loading, "loading the model", plan.deadlines.load)
    check_loaded(plan, trainer.model_config.attention_backend, loaded)
    _launch_replicas(trainer)
    trainer.checkpoint_manager = WeightPublisher(
        omega_conf_to_dataclass(rollout.checkpoint_engine),
        trainer.ranks,
        trainer.replicas,
        colocated=not trainer.disaggregated,
        deadlines=plan.deadlines,
    )


@auto_await
async def _launch_replicas(trainer) -> None:
    for replica in trainer.replicas:
        if trainer.disaggregated:
            pool = trainer.resource_pool_manager.resource_pool_dict[ROLLOUT_POOL]
            await replica.init_from_group(trainer.rollout_wg, pool)
        else:
            await replica.init_hybrid(trainer.actor_rollout_wg)


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
