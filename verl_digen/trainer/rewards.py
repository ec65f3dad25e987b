"""veRL's reward workers for images: no tokenizer, devices of their own on request, restart after a death."""

from __future__ import annotations

import os
from typing import Any

import ray
from omegaconf import DictConfig
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy
from verl import DataProto
from verl.experimental.reward_loop import RewardLoopManager
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.plugin.platform import get_platform
from verl.trainer.ppo.reward import load_reward_manager

from verl_digen.config.deadlines import Deadlines
from verl_digen.config.digen import parse_digen
from verl_digen.sync.calls import results

# of the resource that marks an accelerator type: any share, so that a node never runs out of it
ACCELERATOR_SHARE = 1e-4


def build_rewards(config: DictConfig, router_address: str | None = None) -> RewardManagerBase:
    """The reward manager of a configuration, in a reward worker; in the driver, to see that there is one.

    Raises:
        ValueError: an unknown or unusable reward, or a file that ends the process when it is imported.
    """
    try:
        return load_reward_manager(config, None, reward_router_address=router_address, reward_model_tokenizer=None)
    except SystemExit as error:
        raise ValueError(
            f"reward.custom_reward_function.path={config.reward.custom_reward_function.path} calls sys.exit when it is "
            "imported"
        ) from error


class DiffusionRewardLoopWorker(RewardLoopWorker):
    """A reward worker without text tokenizers (which veRL would load with remote code allowed)."""

    def _init_reward_fn(self) -> None:
        self.input_tokenizer = None
        self.reward_model_tokenizer = None
        self.reward_manager = build_rewards(self.config, self.reward_router_address)

    async def compute_score_batch(self, data: DataProto) -> list[dict[str, Any]]:
        """Scores of a fragment's samples."""
        return await self.reward_manager.run_batch(data)

    def pid(self) -> int:
        """Process id; answers when the rewards have been built."""
        return os.getpid()


class DiffusionRewardLoopManager(RewardLoopManager):
    """veRL's manager with :class:`DiffusionRewardLoopWorker`; workers have no names: runs may share a cluster.

    With ``trainer.v1.digen.reward_workers.num_gpus`` each worker has devices of its own, in one placement group.
    """

    def _init_reward_loop_workers(self) -> None:
        self.reward_loop_workers_class = ray.remote(DiffusionRewardLoopWorker)
        self._options = self._placed() if parse_digen(self.config.trainer.v1.digen).reward_workers.num_gpus else None
        if self._options is None:
            nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
            places = [nodes[index % len(nodes)] for index in range(self.config.reward.num_workers)]
            self._options = [
                # elsewhere if there is no room
                {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node, soft=True)}
                for node in places
            ]
        self.reward_loop_workers = [self._start(index) for index in range(self.config.reward.num_workers)]

    def _placed(self) -> list[dict[str, Any]]:
        """Ray's options of each worker in a placement group with a bundle per worker.

        Raises:
            TimeoutError: the cluster has no room for it.
        """
        digen = parse_digen(self.config.trainer.v1.digen)
        device, amount = get_platform().ray_resource_name(), digen.reward_workers.num_gpus
        kind = digen.accelerator_type.reward
        bundle = {"CPU": 1, device: amount} | ({kind: ACCELERATOR_SHARE} if kind else {})
        self.placement_group = placement_group([bundle] * self.config.reward.num_workers)
        results([self.placement_group.ready()], "placing the reward workers", Deadlines.of(digen.failure).load)
        options = {"num_cpus": 1} | ({"num_gpus": amount} if device == "GPU" else {"resources": {device: amount}})
        count = self.config.reward.num_workers
        places = [PlacementGroupSchedulingStrategy(self.placement_group, index) for index in range(count)]
        return [options | {"scheduling_strategy": place} for place in places]

    def _start(self, index: int):
        worker = self.reward_loop_workers_class.options(**self._options[index])
        return worker.remote(self.config, self.reward_router_address)

    def restart(self, index: int):
        """Replace a worker that died or hangs; returns the new handle.

        Raises:
            ray.exceptions.RayActorError: the new one cannot be built either.
            TimeoutError: it is not there within ``failure.sync_timeout_s``.
        """
        ray.kill(self.reward_loop_workers[index])
        worker = self._start(index)
        deadlines = Deadlines.of(parse_digen(self.config.trainer.v1.digen).failure)
        results([worker.pid.remote()], f"replacing reward worker {index}", deadlines.load)
        self.reward_loop_workers[index] = worker
        return worker
