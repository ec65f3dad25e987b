"""I7, I10: what cannot work ends a run with the sample, the place and the cause, or before a device is taken."""

from __future__ import annotations

import pytest

from tests.e2e.harness import disaggregated

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

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


def test_a_bad_reward_ends_the_run_and_is_named(one, tmp_path):
    (tmp_path / "judge.py").write_text(REWARD)
    judged = [
        f"reward.custom_reward_function.path={tmp_path / 'judge.py'}",
        "reward.custom_reward_function.name=judge",
    ]
    (tmp_path / "behaviour").write_text("0.5")
    run = one.again(
        "trainer.total_training_steps=1",
        "trainer.v1.digen.failure.reward_timeout_s=5",
        "trainer.v1.digen.failure.max_retries=1",
        tuning=judged,
    )
    for behaviour, expected in (("raises", "the judge is out"), ("nan", "nan"), ("hangs", "timed out")):
        (tmp_path / "behaviour").write_text(behaviour)
        run.afresh()
        with pytest.raises(RuntimeError, match=expected) as caught:
            run.fit()
        assert "sample" in str(caught.value) and "max_retries=1" in str(caught.value)
    # the workers are whole: with a sound reward the same trainer goes on
    (tmp_path / "behaviour").write_text("0.5")
    run.afresh()
    run.fit()
    assert run.steps()[0]["reward/extra/reward/custom"] == 0.5


def test_a_placement_that_cannot_be_met_lists_the_cluster(launch):
    with pytest.raises(ValueError, match="rollout_pool needs 17 GPU") as caught:
        launch(*disaggregated(17))
    assert "GPU=" in str(caught.value)
    with pytest.raises(ValueError, match="accelerator_type:H100"):
        launch("trainer.v1.digen.accelerator_type.trainer='accelerator_type:H100'")


def test_a_reward_that_is_not_there_is_refused_before_a_device_is_taken(launch, tmp_path):
    with pytest.raises(ValueError, match="unknown reward 'nonsense'"):
        launch("+trainer.v1.digen.rewards.nonsense={weight: 1.0}")
    with pytest.raises(ValueError, match="no file"):
        launch(f"+trainer.v1.digen.rewards.mine={{path: {tmp_path / 'absent.py'}}}")
