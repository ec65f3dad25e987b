"""I7: what dies or hangs is repaired with the same result."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import ray

from tests.e2e.harness import relative_difference

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TWO_STEPS = "trainer.total_training_steps=2"
ONE_SHOT = [TWO_STEPS, "trainer.v1.digen.sampling.batch_size=2"]


def _assigned(worker) -> dict[str, float]:
    return ray.get_runtime_context().get_assigned_resources()


def disturb(pid: int, sent: signal.Signals, ready, seconds: float = 60.0) -> threading.Thread:
    """Send a signal to ``pid`` as soon as ``ready()`` is true."""

    def work():
        deadline = time.monotonic() + seconds
        while not ready() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(pid, sent)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.fixture(scope="module")
def undisturbed():
    return {}


@pytest.mark.parametrize(
    "victim", ["replica", "reward worker", "replica while streaming", "replica at publish", "replica that hangs"]
)
def test_a_process_that_dies_or_hangs_changes_nothing(pools, undisturbed, victim):
    run = pools
    if not undisturbed:
        undisturbed["weights"] = run.again(*ONE_SHOT).fit().weights()
    options = ONE_SHOT
    if victim.endswith("streaming"):
        options = [TWO_STEPS, "trainer.v1.digen.preset=digen", "trainer.v1.digen.gap.fragment_size=2"]
    if victim.endswith("hangs"):
        options = [*ONE_SHOT, "trainer.v1.digen.failure.generate_timeout_s=10"]
    run.again(*options)
    if victim == "reward worker":
        pid = ray.get(run.trainer.reward_loop_manager.reward_loop_workers[0].pid.remote())
    else:
        pid = ray.get(run.trainer.fleet.replicas[1].workers[0].ping.remote())["pid"]
    sent = signal.SIGSTOP if victim.endswith("hangs") else signal.SIGKILL
    if victim.endswith("publish"):
        run.trainer.on_step_end = lambda: (
            run.trainer.global_steps == 1 and os.kill(pid, sent),
            type(run.trainer).on_step_end(run.trainer),
        )
        run.fit()
        del run.trainer.on_step_end
    else:
        thread = disturb(pid, sent, lambda: run.manager.in_flight > 0)
        run.fit()
        thread.join()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    if victim == "reward worker":  # the new one is in the same placement group, with the device of the old one
        worker = run.trainer.reward_loop_manager.reward_loop_workers[0]
        assert ray.get(worker.__ray_call__.remote(_assigned)).get("GPU") == 0.5
    assert len(run.steps()) == 2
    assert relative_difference(undisturbed["weights"], run.weights()) <= 1e-9
