"""Runs of the real trainer on a shared Ray cluster: what ``TaskRunnerV1.run`` does, in the test's own process.

The cluster and the TransferQueue are started once per test session. Starting a worker process costs seconds of a core,
so one set of processes runs many variants: :meth:`Run.again` gives it other options and the initial weights.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ray
import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from torch.distributed.tensor import DTensor
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine import EngineRegistry

from verl_digen.config.plan import resolve_plan

RECIPES = Path(__file__).resolve().parents[2] / "recipes"

# Small enough to be started often: 3 prompts x 4 samples, 4 denoising steps, one thread per process.
SMALL = [
    "data.train_batch_size=3",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.use_kl_loss=false",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.val_kwargs.n=1",
    "trainer.v1.digen.sampling.num_steps=4",
    "trainer.v1.digen.validation.grid_samples=0",
    "trainer.v1.digen.threads.trainer=1",
    "trainer.v1.digen.threads.rollout=1",
    "trainer.v1.digen.failure.sync_timeout_s=240",
    "trainer.v1.digen.failure.generate_timeout_s=120",
    "trainer.v1.digen.failure.reward_timeout_s=120",
    "trainer.v1.digen.failure.train_timeout_s=240",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.total_epochs=1000",
    "trainer.logger=[file]",
    "trainer.resume_mode=disable",
]
FLOAT64 = ["trainer.v1.digen.arithmetic=float64", "actor_rollout_ref.model.dtype=float64"]


def disaggregated(replicas: int = 1) -> list[str]:
    return [
        "trainer.v1.digen.placement=disaggregated",
        "actor_rollout_ref.rollout.nnodes=1",
        f"actor_rollout_ref.rollout.n_gpus_per_node={replicas}",
    ]


# the sets of processes that tests share, see conftest.py
SETS = {
    "one": FLOAT64,
    "pools": [*FLOAT64, *disaggregated(3), "trainer.n_gpus_per_node=2", "trainer.v1.digen.reward_workers.num_gpus=0.5"],
}


def compose(digits_dir: Path, run_dir: Path, overrides: list[str]) -> DictConfig:
    """The digits recipe with overrides, composed as ``main_ppo`` does."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    with initialize_config_dir(config_dir=str(RECIPES), version_base=None):
        config = hydra_compose(
            "digits",
            overrides=[
                "hydra.searchpath=[pkg://verl.trainer.config,pkg://verl_digen.config]",
                f"recipe.digits_dir={digits_dir}",
                f"trainer.default_local_dir={run_dir}",
                *overrides,
            ],
        )
    with open_dict(config):
        config.transfer_queue.enable = True
    OmegaConf.resolve(config)
    return config


def _remember_start(worker) -> None:
    """On a training worker: keep what :func:`_reset` needs."""
    engine = worker.engine
    worker._start_of_test = (
        [p.detach().clone() for p in engine.trainable_parameters()],
        copy.deepcopy(engine.lr_scheduler.state_dict()),
        [group["lr"] for group in engine.optimizer.param_groups],
    )


def _reset(worker, rule, digen) -> None:
    """On a training worker: the initial weights, a new optimizer state and other options."""
    engine = worker.engine
    weights, schedule, rates = worker._start_of_test
    with torch.no_grad():
        for parameter, weight in zip(engine.trainable_parameters(), weights, strict=True):
            parameter.copy_(weight)
    engine.optimizer.state.clear()
    engine.lr_scheduler.load_state_dict(copy.deepcopy(schedule))
    for group, rate in zip(engine.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    worker.rule, worker.digen = rule, digen
    worker.transaction, worker._published = None, (-1, False, 0)


def _rebuild(worker, model_config, actor_config, rule, digen, with_reference: bool):
    """On a training worker: another model in the same process."""
    worker.model_config, worker.digen, worker.rule = model_config, digen, rule
    worker.engine = EngineRegistry.new(
        model_type=worker.config.model_type,
        backend=worker.engine_config.strategy,
        model_config=model_config,
        engine_config=actor_config.engine,
        optimizer_config=actor_config.optim,
        checkpoint_config=actor_config.checkpoint,
    )
    worker.engine.configure(digen, with_reference=with_reference, seed=worker.seed)
    worker.init_model()
    _remember_start(worker)


def _rebuild_sampler(worker, model_config, digen) -> None:
    worker.init_sampler(model_config, digen, worker.sampler.seed, worker._replica_name)


def _rebuild_reward(worker, config) -> None:
    worker.config = config
    worker._init_reward_fn()


def _whole_weights(worker) -> dict[str, torch.Tensor]:
    """On a training worker: every trained tensor; all ranks gather together."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in worker.engine.named_trainable()
    }


def _parameter_gathers(worker) -> tuple[int, int]:
    return worker.engine.collectives.gathers, len(list(worker.engine._fsdp_modules()))


def _configure_sampler(worker, digen) -> None:
    worker.sampler.digen = digen


def _shorten_memory(worker, cells: int | None, where: str) -> None:
    """On a training worker: more than ``cells`` cells do not fit; None: all do.

    Noticed in the middle of the model's forward or backward.
    """
    if cells is None:
        worker._enough_memory()
        return

    def cramped(module, inputs, output):
        last = output[-1] if isinstance(output, tuple) else output
        if len(last) <= cells:
            return
        if where == "forward":
            raise torch.OutOfMemoryError("no room")

        def fail(gradient):
            raise torch.OutOfMemoryError("no room")

        if last.requires_grad:
            last.register_hook(fail)

    block = worker.engine.module.transformer_blocks[1]
    worker._enough_memory = block.register_forward_hook(cramped).remove


@dataclass
class Run:
    """A trainer and its manager, torn down by :meth:`close`."""

    digits_dir: Path
    folder: Path
    overrides: list[str]
    config: DictConfig = None
    trainer: object = None
    manager: object = None
    log: list[dict] = field(default_factory=list)
    variants: int = 0
    tuning: Sequence[str] = ()

    def start(self) -> Run:
        self.config = compose(self.digits_dir, self.folder, self.overrides)
        from verl.trainer.ppo.v1 import get_trainer_cls
        from verl.utils.import_utils import load_class_from_fqn

        self.trainer = get_trainer_cls(self.config.trainer.v1.trainer_mode)(config=self.config)
        self.trainer.init()
        manager = load_class_from_fqn(self.config.actor_rollout_ref.rollout.agent.agent_loop_manager_class, "manager")
        self.manager = manager.create(
            config=self.config,
            llm_client=self.trainer.get_llm_client(),
            teacher_client=self.trainer.get_teacher_client(),
            reward_loop_worker_handles=self.trainer.get_reward_handles(),
        )
        ray.get([w.__ray_call__.remote(_remember_start) for w in self.trainer.ranks.workers])
        return self

    def again(self, *overrides: str, tuning: Sequence[str] = ()) -> Run:
        """The same processes from the initial weights, with other options.

        Args:
            tuning: options that need another engine (LoRA, a reference module, the optimizer, the model); it is built
                anew in the processes when they differ from those of the call before.
        """
        trainer, old = self.trainer, self.trainer.plan
        self.variants += 1
        folder = self.folder.with_name(f"{self.folder.name}_{self.variants}")
        self.config = trainer.config = compose(self.digits_dir, folder, [*self.overrides, *tuning, *overrides])
        trainer.plan = plan = resolve_plan(self.config)
        for name in ("trainer_ranks", "replicas", "seed"):
            assert getattr(plan, name) == getattr(old, name), f"{name} needs processes of its own"
        trainer._init_dataloader()
        trainer._check_model()
        resumed = trainer.find_checkpoint()
        ranks, samplers = trainer.ranks.workers, [r.workers[0] for r in trainer.fleet.replicas]
        rule, model = trainer.step_rule(), trainer.model_config
        if tuning != self.tuning:
            self.tuning = tuning
            reference = resolve_plan(compose(self.digits_dir, folder, [*self.overrides, *tuning])).with_reference
            actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
            ray.get([w.__ray_call__.remote(_rebuild, model, actor, rule, plan.digen, reference) for w in ranks])
            if trainer.disaggregated:
                ray.get([s.__ray_call__.remote(_rebuild_sampler, model, plan.digen) for s in samplers])
                trainer.workers.rollout_class.kwargs.update(
                    model=model, digen=plan.digen
                )  # for those that are restarted
            rewards = trainer.reward_loop_manager
            rewards.config = self.config
            ray.get([w.__ray_call__.remote(_rebuild_reward, self.config) for w in rewards.reward_loop_workers])
        ray.get([w.__ray_call__.remote(_reset, rule, plan.digen) for w in ranks])
        ray.get([s.__ray_call__.remote(_configure_sampler, plan.digen) for s in samplers])
        self.manager.pool.expected = trainer.expected_sampling
        self.manager.begin(plan.digen, plan.n, trainer.get_llm_client().ledger)
        self.manager.__dict__.pop("group_within", None)
        if resumed is not None:
            trainer.load_engines(resumed)
        trainer.tile_size = trainer._tile_size()
        trainer.on_init_end()  # publishes the weights
        return self

    def afresh(self) -> Run:
        """Begin at step 0 again with the weights that are there, also after a run that an error ended."""
        self.trainer.global_steps = 0
        self.manager.begin(self.trainer.plan.digen, self.trainer.plan.n, self.trainer.get_llm_client().ledger)
        return self

    def shorten_memory(self, rank: int, cells: int | None, where: str = "forward") -> None:
        """From now on tiles of more than ``cells`` cells do not fit on a Trainer rank; None ends it."""
        ray.get(self.trainer.ranks.workers[rank].__ray_call__.remote(_shorten_memory, cells, where))

    def parameter_gathers(self) -> list[tuple[int, int]]:
        """All-gathers of parameters so far, and sharded modules, of each Trainer rank."""
        return ray.get([w.__ray_call__.remote(_parameter_gathers) for w in self.trainer.ranks.workers])

    def order_groups(self, order) -> Run:
        """Hold the groups of a step back until all are there, and hand them on as ``order(list)`` says."""
        receive, held = self.manager.group_within, []

        def group_within(timeout_s: float, wait_s: float):
            if not held:
                arrived = []
                while len(arrived) < self.trainer.plan.prompts:
                    group = receive(timeout_s, timeout_s)
                    arrived += [] if group is None else [group]
                place = {g.uid: i for i, g in enumerate(self.trainer._groups_of_step(self.trainer.global_steps))}
                held.extend(order(sorted(arrived, key=lambda result: place[result.group.uid])))
            return held.pop(0)

        self.manager.group_within = group_within
        return self

    def fit(self) -> Run:
        log = Path(self.config.trainer.default_local_dir) / f"log_{self.trainer.global_steps}.jsonl"
        log.parent.mkdir(parents=True, exist_ok=True)
        os.environ["VERL_FILE_LOGGER_PATH"] = str(log)
        self.trainer.fit(self.manager)
        self.trainer.logger.finish()
        self.log = [json.loads(line) for line in log.read_text().splitlines()]
        return self

    def steps(self) -> list[dict]:
        """Metrics of the training steps."""
        return [row["data"] for row in self.log if "training/global_step" in row["data"]]

    def weights(self) -> dict[str, torch.Tensor]:
        """The trained weights, whole, in the master dtype."""
        return ray.get([w.__ray_call__.remote(_whole_weights) for w in self.trainer.ranks.workers])[0]

    def close(self) -> None:
        """End the processes of this run and free its placement groups."""
        if self.trainer is None:
            return
        if self.manager is not None:
            self.manager.close()
            self.manager = None
        workers = getattr(self.trainer, "workers", None)
        groups = [] if workers is None else [workers.trainer, workers.rollout]
        actors = [worker for group in groups if group is not None for worker in group.workers]
        fleet = getattr(self.trainer, "fleet", None)
        actors += [worker for replica in fleet.replicas for worker in replica.workers] if fleet is not None else []
        rewards = getattr(self.trainer, "reward_loop_manager", None)
        actors += rewards.reward_loop_workers if rewards is not None else []
        for actor in actors:
            ray.kill(actor)
        pools = getattr(self.trainer, "resource_pool_manager", None)
        for pool in pools.resource_pool_dict.values() if pools is not None else []:
            for group in pool.pgs or []:
                ray.util.remove_placement_group(group)
        if getattr(rewards, "placement_group", None) is not None:
            ray.util.remove_placement_group(rewards.placement_group)


def relative_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """‖a − b‖ / ‖a‖ over all tensors."""
    assert set(a) == set(b)
    difference = sum(float((a[k] - b[k]).double().square().sum()) for k in a)
    size = sum(float(a[k].double().square().sum()) for k in a)
    return (difference / size) ** 0.5
