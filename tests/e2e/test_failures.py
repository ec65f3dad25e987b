"""I7: what dies, hangs or raises is repaired with the same result, or ends the run with the sample, place and cause."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import ray

from tests.e2e.harness import FLOAT64, disaggregated, relative_difference

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

KEEP = ["actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]"]
FRAGMENTS = "trainer.v1.digen.sampling.batch_size=2"

REWARDS = '''
import os, time

def raises(**_):
    raise RuntimeError("the judge is out")

def hangs(**_):
    time.sleep(600)

def not_finite(**_):
    return {"score": float("nan")}

def slow(**_):
    time.sleep(0.15)
    return {"score": float(os.getpid() % 1)}
'''


@pytest.fixture
def reward_file(tmp_path) -> Path:
    file = tmp_path / "judge.py"
    file.write_text(REWARDS)
    return file


@pytest.fixture(scope="module")
def undisturbed():
    return {}


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


@pytest.mark.parametrize("victim", ["replica", "reward worker", "replica while streaming", "replica that hangs"])
def test_a_process_that_dies_or_hangs_changes_nothing(launch, undisturbed, victim):
    options = [*FLOAT64, *KEEP, *disaggregated(2), FRAGMENTS]
    if not undisturbed:
        run = launch(*options, steps=2).fit()
        undisturbed["weights"] = run.weights()
        run.close()
    if victim.endswith("streaming"):
        options = [*options[:-1], "trainer.v1.digen.gap.enable=true", "trainer.v1.digen.gap.fragment_size=2"]
    if victim.endswith("hangs"):
        options = [*options, "trainer.v1.digen.failure.generate_timeout_s=20"]
    run = launch(*options, steps=2)
    if victim == "reward worker":
        pid = ray.get(run.trainer.reward_loop_manager.reward_loop_workers[0].pid.remote())
    else:
        pid = ray.get(run.trainer.replicas[1].workers[0].ping.remote())["pid"]
    sent = signal.SIGSTOP if victim.endswith("hangs") else signal.SIGKILL
    thread = disturb(pid, sent, lambda: run.manager.in_flight > 0)
    run.fit()
    thread.join()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert relative_difference(undisturbed["weights"], run.weights()) <= 1e-9


@pytest.mark.parametrize(
    ("function", "expected"),
    [("raises", "the judge is out"), ("hangs", "timed out"), ("not_finite", "nan")],
)
def test_a_bad_reward_ends_the_run_and_is_named(launch, reward_file, function, expected):
    run = launch(
        f"reward.custom_reward_function.path={reward_file}",
        f"reward.custom_reward_function.name={function}",
        "trainer.v1.digen.failure.reward_timeout_s=3",
        "trainer.v1.digen.failure.max_retries=1",
        steps=1,
    )
    with pytest.raises(RuntimeError, match=expected) as caught:
        run.fit()
    assert "sample" in str(caught.value)
    assert "max_retries=1" in str(caught.value)


def test_a_placement_that_cannot_be_met_lists_the_cluster(launch):
    with pytest.raises(ValueError, match="rollout_pool needs 9 GPU") as caught:
        launch(*disaggregated(9))
    assert "GPU=8" in str(caught.value)
    with pytest.raises(ValueError, match="accelerator_type:H100"):
        launch("trainer.v1.digen.accelerator_type.trainer='accelerator_type:H100'")
