"""Two runs on one Ray cluster: the second is refused at once, the first goes on as if alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import ray

from tests.e2e.harness import RECIPES, SMALL
from verl_digen.config.paths import override

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_a_second_run_on_the_cluster_is_refused_and_the_first_goes_on(one, digits_dir, tmp_path):
    second = subprocess.run(
        [
            *(sys.executable, "-m", "verl.trainer.main_ppo", "--config-dir", str(RECIPES), "--config-name", "digits"),
            *SMALL,
            override("recipe.digits_dir", digits_dir),
            override("trainer.default_local_dir", tmp_path / "second"),
            f"ray_kwargs.ray_init.address={ray.get_runtime_context().gcs_address}",
            "ray_kwargs.ray_init.num_cpus=null",
            "ray_kwargs.ray_init.num_gpus=null",
            "~ray_kwargs.ray_init._system_config",
        ],
        cwd=tmp_path,
        env={**os.environ, "VERL_FILE_LOGGER_PATH": str(tmp_path / "second.jsonl")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert second.returncode != 0
    assert "this Ray cluster already serves another run" in second.stdout + second.stderr
    assert not (tmp_path / "second").exists()
    run = one.again("trainer.total_training_steps=1").fit()  # its TransferQueue is there
    assert len(run.steps()) == 1
