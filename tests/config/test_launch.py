"""The command line up to the start of Ray: what ``main_ppo`` gets from the digits recipe, in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from verl_digen.config.paths import override

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
# as verl.trainer.main_ppo.main begins, without the imports that take its time
MAIN = """
import json, os, sys, hydra
from omegaconf import OmegaConf

@hydra.main(config_path=sys.argv.pop(1), config_name="ppo_trainer", version_base=None)
def main(config):
    found = {
        "devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "files": config.data.train_files,
        "folder": config.trainer.default_local_dir,
        "ray": OmegaConf.to_container(config.ray_kwargs.ray_init),
    }
    print(json.dumps(found))

main()
"""


def launch(cwd: Path, recipes: Path, *overrides: str, devices: str) -> dict:
    verl = Path(find_spec("verl").submodule_search_locations[0]) / "trainer" / "config"
    command = [sys.executable, "-c", MAIN, str(verl), "--config-dir", str(recipes), "--config-name", "digits"]
    command.append("~hydra.callbacks.digen_check")  # it would look for the model
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": devices}
    ended = subprocess.run(
        [*command, *overrides], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("devices", ["", "NoDevFiles"])
def test_folders_of_any_name_and_no_visible_device(tmp_path, devices):
    folder = tmp_path / "a (copy), b=c's é 数"
    shutil.copytree(RECIPES, folder / "recipes")
    found = launch(
        folder,
        folder / "recipes",
        override("recipe.digits_dir", folder / "data"),
        override("trainer.default_local_dir", folder / "out"),
        devices=devices,
    )
    assert found["files"] == f"{folder}/data/train.parquet" and found["folder"] == f"{folder}/out"
    assert found["devices"] is None and found["ray"]["num_gpus"] == 2
    assert found["ray"]["address"] == "local"  # a cluster that runs on the machine would refuse num_gpus


def test_devices_of_a_gpu_run_are_left_as_they_are(tmp_path):
    found = launch(tmp_path, RECIPES, "trainer.device=cuda", devices="3,4")
    assert found["devices"] == "3,4"
