"""veRL's reward workers for images: no tokenizer, restart after a death."""

from __future__ import annotations

import os

import ray
from verl.experimental.reward_loop import RewardLoopManager
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker
from verl.trainer.ppo.reward import load_reward_manager


class DiffusionRewardLoopWorker(RewardLoopWorker):
    """A reward worker without text tokenizers (which veRL would load with remote code allowed)."""

    def _init_reward_fn(self) -> None:
        self.input_tokenizer = None
        self.reward_model_tokenizer = None
        self.reward_manager = load_reward_manager(
            self.config, None, reward_router_address=self.reward_router_address, reward_model_tokenizer=None
        )

    def pid(self) -> int:
        """Process id; answers when the rewards have been built."""
        return os.getpid()


class DiffusionRewardLoopManager(RewardLoopManager):
    """veRL's manager with :class:`DiffusionRewardLoopWorker`."""

    def _init_reward_loop_workers(self) -> None:
        self.reward_loop_workers_class = ray.remote(DiffusionRewardLoopWorker)
        super()._init_reward_loop_workers()

    def restart(self, index: int):
        """Replace a worker that died or hangs; returns the new handle.

        Raises:
            ray.exceptions.RayActorError: the new one cannot be built either.
        """
        ray.kill(self.reward_loop_workers[index])
        worker = self.reward_loop_workers_class.remote(self.config, self.reward_router_address)
        ray.get(worker.pid.remote())
        self.reward_loop_workers[index] = worker
        return worker
