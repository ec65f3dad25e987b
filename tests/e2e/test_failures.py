"""I7: what dies, hangs or raises is repaired with the same result, or ends the run with the sample, place and cause."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import ray

from tests.e2e.harness import FLOAT64, disaggregated, relative_difference

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FRAGMENTS = "trainer.v1.digen.sampling.batch_size=2"

REWARD = """
import time
from pathlib import Path

def judge(**_):
    what = (Path(__file__).parent / "behaviour").read_text()
    if what == "raises":
        raise RuntimeError("the judge is out")
    if what == "hangs":
        time.sleep(600)
    return {"score": float(what)}
"""


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


@pytest.fixture
def pair(processes):
    """Two replicas, a Trainer rank and a reward worker, and the weights that two undisturbed steps give.

    A test that fails ends the set, because it may have left it in any state.
    """
    run = processes("pair", *FLOAT64, *disaggregated(2), steps=2)
    if not hasattr(run, "undisturbed"):
        run.again(FRAGMENTS).fit()
        run.undisturbed = run.weights()
    whole = []
    yield run, lambda: whole.append(True)
    if not whole:
        processes(None)


@pytest.mark.parametrize(
    "victim", ["replica", "reward worker", "replica while streaming", "replica at publish", "replica that hangs"]
)
def test_a_process_that_dies_or_hangs_changes_nothing(pair, victim):
    run, passed = pair
    options = [FRAGMENTS]
    if victim.endswith("streaming"):
        options = ["trainer.v1.digen.preset=digen", "trainer.v1.digen.gap.fragment_size=2"]
    if victim.endswith("hangs"):
        options = [FRAGMENTS, "trainer.v1.digen.failure.generate_timeout_s=10"]
    run.again(*options)
    if victim == "reward worker":
        pid = ray.get(run.trainer.reward_loop_manager.reward_loop_workers[0].pid.remote())
    else:
        pid = ray.get(run.trainer.replicas[1].workers[0].ping.remote())["pid"]
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
    assert len(run.steps()) == 2
    assert relative_difference(run.undisturbed, run.weights()) <= 1e-9
    passed()


def test_a_bad_reward_ends_the_run_and_is_named(launch, tmp_path):
    (tmp_path / "judge.py").write_text(REWARD)
    run = launch(
        f"reward.custom_reward_function.path={tmp_path / 'judge.py'}",
        "reward.custom_reward_function.name=judge",
        "trainer.v1.digen.failure.reward_timeout_s=5",
        "trainer.v1.digen.failure.max_retries=1",
        steps=1,
    )
    for behaviour, expected in (("raises", "the judge is out"), ("nan", "nan"), ("hangs", "timed out")):
        (tmp_path / "behaviour").write_text(behaviour)
        run.trainer.global_steps = 0
        with pytest.raises(RuntimeError, match=expected) as caught:
            run.fit()
        assert "sample" in str(caught.value) and "max_retries=1" in str(caught.value)
    # the workers are whole: with a sound reward the same trainer goes on
    (tmp_path / "behaviour").write_text("0.5")
    run.trainer.global_steps = 0
    run.fit()
    assert run.steps()[0]["reward/extra/reward/custom"] == 0.5


def test_a_placement_that_cannot_be_met_lists_the_cluster(launch):
    with pytest.raises(ValueError, match="rollout_pool needs 9 GPU") as caught:
        launch(*disaggregated(9))
    assert "GPU=8" in str(caught.value)
    with pytest.raises(ValueError, match="accelerator_type:H100"):
        launch("trainer.v1.digen.accelerator_type.trainer='accelerator_type:H100'")


def test_a_reward_that_is_not_there_is_refused_before_a_device_is_taken(launch, tmp_path):
    with pytest.raises(ValueError, match="unknown reward 'nonsense'"):
        launch("+trainer.v1.digen.rewards.nonsense={weight: 1.0}")
    with pytest.raises(ValueError, match="no file"):
        launch(f"+trainer.v1.digen.rewards.mine={{path: {tmp_path / 'absent.py'}}}")
