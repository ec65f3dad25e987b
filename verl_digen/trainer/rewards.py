"""veRL's reward workers for images: no tokenizer, restart after a death."""

from __future__ import annotations

import os

import ray
from omegaconf import DictConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.experimental.reward_loop import RewardLoopManager
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.trainer.ppo.reward import load_reward_manager

from verl_digen.config.deadlines import Deadlines
from verl_digen.config.digen import parse_digen
from verl_digen.sync.calls import results


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

    def pid(self) -> int:
        """Process id; answers when the rewards have been built."""
        return os.getpid()


class DiffusionRewardLoopManager(RewardLoopManager):
    """veRL's manager with :class:`DiffusionRewardLoopWorker`; workers have no names: runs may share a cluster."""

    def _init_reward_loop_workers(self) -> None:
        self.reward_loop_workers_class = ray.remote(DiffusionRewardLoopWorker)
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
        self._nodes = [nodes[index % len(nodes)] for index in range(self.config.reward.num_workers)]
        self.reward_loop_workers = [self._start(node) for node in self._nodes]

    def _start(self, node: str):
        """A worker on ``node``, or elsewhere if there is no room."""
        place = NodeAffinitySchedulingStrategy(node_id=node, soft=True)
        options = self.reward_loop_workers_class.options(scheduling_strategy=place)
        return options.remote(self.config, self.reward_router_address)

    def restart(self, index: int):
        """Replace a worker that died or hangs; returns the new handle.

        Raises:
            ray.exceptions.RayActorError: the new one cannot be built either.
            TimeoutError: it is not there within ``failure.sync_timeout_s``.
        """
        ray.kill(self.reward_loop_workers[index])
        worker = self._start(self._nodes[index])
        deadlines = Deadlines.of(parse_digen(self.config.trainer.v1.digen).failure)
        results([worker.pid.remote()], f"replacing reward worker {index}", deadlines.load)
        self.reward_loop_workers[index] = worker
        return worker
