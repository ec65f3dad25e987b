"""The main job as a user starts it: `python -m verl.trainer.main_ppo` on the digits recipe learns."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.e2e.harness import RECIPES, disaggregated

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STEPS = 10


def test_digits_accuracy_rises(digits_dir, tmp_path):
    """10 steps, disaggregated, streaming: validation accuracy gains at least 0.15 and passes 0.7.

    The recipe's 16 steps go further; what is not covered here is how fast a step is.
    """
    log = tmp_path / "log.jsonl"
    command = [
        *(sys.executable, "-m", "verl.trainer.main_ppo", "--config-dir", str(RECIPES), "--config-name", "digits"),
        f"recipe.digits_dir={digits_dir}",
        f"trainer.default_local_dir={tmp_path}",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.test_freq={STEPS}",
        "trainer.save_freq=-1",
        "trainer.v1.digen.preset=digen",
        "trainer.v1.digen.threads.trainer=1",
        "trainer.v1.digen.threads.rollout=1",
        "actor_rollout_ref.rollout.val_kwargs.n=10",
        *disaggregated(),
    ]
    environment = {**os.environ, "VERL_FILE_LOGGER_PATH": str(log)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "resolved plan" in done.stdout and "disaggregated + GAP + TSP" in done.stdout
    rows = [json.loads(line)["data"] for line in log.read_text().splitlines()]
    accuracy = [value for row in rows for name, value in row.items() if name.startswith("val-core/digits/acc/mean@")]
    assert len(accuracy) == 2
    assert accuracy[0] <= 0.65
    assert accuracy[1] >= max(0.7, accuracy[0] + 0.15), accuracy
    quality = [{k.rpartition("/")[2]: v for k, v in row.items() if "/digit_quality/" in k} for row in rows]
    before, after = (row for row in quality if row)
    assert min(after["judge_svm"], after["judge_knn"]) >= 0.7, after  # judges that are not the reward
    assert after["distance"] < before["distance"] and after["spread"] >= 0.1, (before, after)
    steps = [row for row in rows if "training/global_step" in row]
    assert len(steps) == STEPS
    assert all(step["actor/ratio_max_dev"] == 0.0 and step["sync/changed"] == 1.0 for step in steps)
    assert all(step["actor/log_prob_gap_max"] < 1e-3 for step in steps)
    assert (tmp_path / "grids" / f"step_{STEPS:05d}.png").exists()
