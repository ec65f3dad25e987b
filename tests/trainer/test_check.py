"""A bad configuration is refused before Ray starts; ``verl-digen check`` makes the same checks; recipes are found."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.callbacks import Callbacks
from omegaconf import OmegaConf

from tests.config.harness import digits, digits_dir  # noqa: F401 - fixtures
from verl_digen.cli.simulate import load_case, load_testbed
from verl_digen.shipped import shipped, verl_config_folder
from verl_digen.trainer.check import check_run

CALLBACK = "verl_digen.trainer.check.CheckBeforeStart"


@pytest.fixture
def started(digits):  # noqa: F811
    """Hydra's own dispatch of our callback; returns normally where the run would start."""

    def start(*overrides: str) -> None:
        config = digits(*overrides, resolve=False)
        OmegaConf.set_struct(config, False)
        with_hydra = OmegaConf.merge(config, {"hydra": {"callbacks": {"digen_check": {"_target_": CALLBACK}}}})
        OmegaConf.set_struct(with_hydra, True)
        before = copy.deepcopy(with_hydra)
        callbacks = Callbacks(with_hydra)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            callbacks.on_job_start(config=with_hydra, task_function=lambda _: None)
        assert not [w for w in caught if "Callback" in str(w.message)], "Hydra goes on after an exception"
        assert with_hydra == before

    return start


def test_a_sound_configuration_passes_and_gives_the_plan_of_the_trainer(started, digits):  # noqa: F811
    started()
    rows = dict(check_run(digits(resolve=False)))
    assert rows["step"] == "10 prompts x 16 samples = 160 samples" and "digits" in rows["model"]
    assert rows["sampling"].startswith("10 steps, sde eta 0.7")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["actor_rollout_ref.rollout.n=1"], "actor_rollout_ref.rollout.n=1"),
        (["++data.max_prompt_length=7"], "data.max_prompt_length=7"),  # an option that a diffusion run does not read
        (["trainer.total_training_steps=100000"], "raise it to"),  # needs the prompt files
        (["+trainer.v1.digen.rewards.nonsense={weight: 1.0}"], "unknown reward 'nonsense'"),
        (["trainer.v1.digen.sampling.height=31"], "31"),  # needs the model's files
        (["trainer.resume_mode=resume_path", "trainer.resume_from_path=nowhere"], "holds no complete checkpoint"),
        (["+recipe.reward_file=???"], "needs a value for recipe.reward_file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_the_driver_would_refuse_ends_the_program_before_ray(started, overrides, words):
    import ray

    with pytest.raises(SystemExit) as ended:
        started(*overrides)
    assert str(ended.value).startswith("verl_digen: nothing was started: ") and words in str(ended.value)
    assert not ray.is_initialized()


def test_an_error_of_the_checks_themselves_is_shown_and_ends_the_program(started, monkeypatch, capsys):
    def broken(config):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("verl_digen.trainer.check.check_run", broken)
    with pytest.raises(SystemExit, match="the checks of the configuration failed"):
        started()
    assert "RuntimeError: a fault of ours" in capsys.readouterr().err


def test_runs_of_another_trainer_are_not_looked_at(started):
    started("trainer.v1.trainer_mode=sync", "actor_rollout_ref.rollout.n=1")


def test_every_composition_with_our_group_carries_the_callback_and_it_can_be_taken_out():
    with initialize_config_dir(config_dir=str(verl_config_folder()), version_base=None):
        config = compose("ppo_trainer", overrides=["+digen=default"], return_hydra_config=True)
        without = compose(
            "ppo_trainer", overrides=["+digen=default", "~hydra.callbacks.digen_check"], return_hydra_config=True
        )
    assert config.hydra.callbacks.digen_check._target_ == CALLBACK
    assert "digen_check" not in without.hydra.callbacks


# ---- as a user starts it ----------------------------------------------------------------------------------------


def run(folder: Path, *command: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "VERL_PLATFORM": "cpu"}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=500
    )


def test_main_ppo_finds_the_recipe_anywhere_and_refuses_before_ray(tmp_path, digits_dir):  # noqa: F811
    done = run(
        tmp_path,
        *("-m", "verl.trainer.main_ppo", "--config-name", "digits"),
        *(f"recipe.digits_dir={digits_dir}", "actor_rollout_ref.rollout.n=1"),
    )
    assert done.returncode == 1
    assert "verl_digen: nothing was started: actor_rollout_ref.rollout.n=1" in done.stderr
    assert "ray init kwargs" not in done.stdout and "Traceback" not in done.stderr


def test_the_command_prints_the_plan_of_a_recipe_file_and_leaves_nothing(tmp_path, digits_dir):  # noqa: F811
    (tmp_path / "mine (1).yaml").write_text(
        f"defaults: [digits, _self_]\nrecipe: {{digits_dir: '{digits_dir}'}}\ntrainer: {{experiment_name: mine}}\n"
    )
    done = run(tmp_path, "-m", "verl_digen.cli.main", "check", "mine (1).yaml", "data.train_batch_size=5")
    assert done.returncode == 0, done.stderr
    assert "5 prompts x 16 samples = 80 samples" in done.stdout and "this run would start" in done.stdout
    assert "ray init kwargs" not in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["mine (1).yaml"]
    done = run(tmp_path, "-m", "verl_digen.cli.main", "check", "nowhere.yaml")
    assert done.returncode == 1 and "nowhere.yaml does not exist" in done.stderr


def test_workloads_and_testbeds_are_found_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in (shipped("recipes") / "workloads").glob("*.yaml"):
        assert load_case(file.stem, None, None).workload.name
    assert load_testbed("A", str(shipped("recipes") / "testbeds" / "devices.yaml")).groups
    with pytest.raises(ValueError, match="no workload file .*flux.1-12b, "):
        load_case("nothing", None, None)


def test_the_folder_is_that_of_the_package_or_of_the_source_tree(tmp_path, monkeypatch):
    module = tmp_path / "verl_digen" / "shipped.py"
    monkeypatch.setattr("verl_digen.shipped.__file__", str(module))
    source, installed = tmp_path / "recipes", tmp_path / "verl_digen" / "recipes"
    source.mkdir()
    assert shipped("recipes") == installed  # a folder of this name beside an installed package is not ours
    (tmp_path / "setup.py").touch()
    assert shipped("recipes") == source
    installed.mkdir(parents=True)
    assert shipped("recipes") == installed
