"""Scoring: fragments go to the reward worker with the fewest samples, and a failure never becomes a value (I7).

A worker that is too late with a fragment gets no more work; it is started again when what else it has is scored or late
too, so nothing that it would still have finished is lost.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import ray

from verl_digen.config.digen import FailureConfig
from verl_digen.rollout.dispatch import short, value_of
from verl_digen.rollout.requests import FragmentReport, RolloutError, Scoring, named

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))


class _Judge:
    def __init__(self, index: int, worker) -> None:
        self.index = index
        self.worker = worker
        self.fragments = 0
        self.samples = 0
        self.ready = True


class Scorer:
    """The reward workers.

    Args:
        workers: handles with ``compute_score_batch``.
        restart: replaces worker ``index`` and returns the new handle; called in a thread.
        failure: retries and deadline.
        spawn: runs a coroutine beside this one; an error of it ends the step.
    """

    def __init__(
        self, workers: list, restart: Callable[[int], Any], failure: FailureConfig, spawn: Callable[[Any], None]
    ) -> None:
        self.judges = [_Judge(index, worker) for index, worker in enumerate(workers)]
        self.failure = failure
        self._restart, self._spawn = restart, spawn
        self._some_ready = asyncio.Event()

    async def score(self, report: FragmentReport, pixels_ref) -> tuple[list[dict[str, Any]], Scoring]:
        """Scores of a fragment, one per sample; its pixels go to the worker from where they are.

        Raises:
            RolloutError: the retries are used up; every attempt is named.
            ray.exceptions.ObjectLostError: the pixels are gone.
        """
        failures: list[str] = []
        while True:
            judge = await self._least_loaded()
            started = time.time()
            try:
                scores = await self._ask(judge, len(report.samples), pixels_ref)
                return scores, Scoring(report.fragment_id, judge.index, len(report.samples), started, time.time())
            except ray.exceptions.ObjectLostError:  # no other worker can score pixels that are gone
                raise
            except Exception as error:  # noqa: BLE001 - counted, and raised when the retries are used up
                what = "timed out" if isinstance(error, asyncio.TimeoutError) else short(error)
                failures.append(f"reward worker {judge.index}: {what}")
                logger.warning("scoring fragment %s failed: %s", report.fragment_id, failures[-1])
                if len(failures) > self.failure.max_retries:
                    raise RolloutError(
                        f"scoring samples {named(report.samples)} of fragment {report.fragment_id} failed "
                        f"{len(failures)} times (trainer.v1.digen.failure.max_retries={self.failure.max_retries}): "
                        + "; ".join(failures)
                    ) from error

    async def _least_loaded(self) -> _Judge:
        """The worker with the fewest samples; waits while all are being replaced."""
        while not (ready := [judge for judge in self.judges if judge.ready]):
            self._some_ready.clear()
            await self._some_ready.wait()
        return min(ready, key=lambda judge: judge.samples)

    async def _ask(self, judge: _Judge, samples: int, pixels_ref) -> list[dict[str, Any]]:
        judge.fragments += 1
        judge.samples += samples
        try:
            call = judge.worker.compute_score_batch.remote(pixels_ref)
            return await asyncio.wait_for(value_of(call), self.failure.reward_timeout_s)
        except (ray.exceptions.RayActorError, asyncio.TimeoutError):
            judge.ready = False  # no more work for it
            raise
        finally:
            judge.fragments -= 1
            judge.samples -= samples
            if not judge.fragments and not judge.ready:
                self._spawn(self._replace(judge))

    async def _replace(self, judge: _Judge) -> None:
        judge.worker = await asyncio.get_running_loop().run_in_executor(None, self._restart, judge.index)
        judge.ready = True
        self._some_ready.set()
