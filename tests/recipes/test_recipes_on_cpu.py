"""Every model recipe composes, is accepted by the plan and sets nothing that a diffusion run does not read (I10).

Its ``???`` values are filled with a tiny model of its family and small prompt files. What is not covered: the memory
that a recipe needs on a real device, and whether it learns.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import MissingMandatoryValue

from verl_digen.config.plan import resolve_plan
from verl_digen.config.unread import check_unread

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml") if not path.stem.startswith("digits"))
# what a recipe leaves to the user -> the option that takes it, which the error names
MANDATORY = {
    "model_dir": "actor_rollout_ref.model.path",
    "train_files": "data.train_files",
    "val_files": "data.val_files",
}


FAMILY = {"sd35": "sd3", "flux": "flux", "qwen": "qwen_image", "wan21": "wan", "hunyuanvideo": "hunyuan_video"}


def family_of(name: str) -> str:
    """Model family of a recipe, by the first word of its name."""
    return FAMILY[name.split("_")[0]]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """Prompts, a reward file, and under ``models`` a tiny model of every family."""
    from verl_digen.data.digits import write_digits_prompts
    from verl_digen.models.tiny import build_tiny, tiny_families

    folder = tmp_path_factory.mktemp("recipes")
    prompts = write_digits_prompts(folder)
    reward = folder / "reward.py"
    reward.write_text("def score(images, prompt, ground_truth, extra):\n    return {'score': 0.0}\n")
    for family in tiny_families():
        build_tiny(family, folder / "models" / family)
    return {
        "model_dir": folder / "models",
        "train_files": prompts["train"],
        "val_files": prompts["val"],
        "reward_file": reward,
    }


@cache
def composed(name: str, *overrides: str) -> DictConfig:
    """The recipe as ``main_ppo --config-name NAME`` composes it."""
    with initialize_config_dir(config_dir=str(RECIPES), version_base=None):
        searched = "hydra.searchpath=[pkg://verl.trainer.config,pkg://verl_digen.config]"
        return compose(name, overrides=[searched, *overrides])


@pytest.fixture
def filled(files):
    """``filled(name, *overrides)``: the resolved recipe; ``without`` leaves one of its ``???`` values open."""

    def fill(name: str, *overrides: str, without: str = "") -> DictConfig:
        config = copy.deepcopy(composed(name, *overrides))
        for key, path in files.items():
            if key != without:
                config.recipe[key] = str(path / family_of(name) if key == "model_dir" else path)
        with open_dict(config):
            config.transfer_queue.enable = True  # as main_ppo does before it builds the trainer
        OmegaConf.resolve(config)
        return config

    return fill


def test_there_are_recipes():
    assert len(NAMES) >= 4


@pytest.mark.parametrize("name", NAMES)
def test_recipe_is_accepted(name, filled):
    config = filled(name)
    check_unread(config)
    plan = resolve_plan(config)
    assert plan.samples == plan.prompts * plan.n
    assert plan.lora_rank == config.actor_rollout_ref.model.lora_rank
    assert config.trainer.device == "cuda" and config.actor_rollout_ref.model.dtype == "bfloat16"


@pytest.mark.parametrize("name", NAMES)
def test_recipe_fits_its_published_model(name, filled):
    """Size, guidance and shift that the recipe asks for are ones that the family takes."""
    from verl_digen.models.family import Guidance, family_for

    config = filled(name)
    path, sampling = config.actor_rollout_ref.model.path, config.trainer.v1.digen.sampling
    cls = family_for(path)
    assert cls.name == family_of(name)
    family = cls(path)
    family.shift = sampling.shift
    plan = resolve_plan(config)
    assert family.sigmas(sampling.num_steps, 32, 32, 5 if sampling.num_frames else 1)[-1] == 0
    family.check_guidance(Guidance.of(plan.digen.sampling))
    assert sampling.height % 16 == 0 and sampling.width % 16 == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_main_ppo_would_start_the_recipe_in_tiny(name, files):
    """All checks that come before Ray, on the configuration as Hydra hands it over: with its interpolations."""
    from verl_digen.trainer.check import check_run

    config = copy.deepcopy(composed(name, "+scale=tiny"))
    for key, path in files.items():
        config.recipe[key] = str(path / family_of(name) if key == "model_dir" else path)
    assert dict(check_run(config))["mode"].startswith(config.trainer.v1.digen.placement)


@pytest.mark.parametrize("name", NAMES)
def test_recipe_is_accepted_in_tiny(name, filled):
    """`+scale=tiny` changes sizes and devices, and nothing of the algorithm."""
    config, tiny = filled(name), filled(name, "+scale=tiny")
    check_unread(tiny)
    plan, small = resolve_plan(config), resolve_plan(tiny)
    assert tiny.trainer.device == "cpu" and small.samples == 8 and small.trainer_ranks == 2
    for what in ("loss", "clip_low", "clip_high", "kl_beta", "lora_rank", "one_shot", "transitions"):
        assert getattr(small, what) == getattr(plan, what), what
    for what in ("kind", "eta", "guidance_scale", "guidance_rescale", "embedded_guidance", "shift", "selection"):
        assert getattr(small.digen.sampling, what) == getattr(plan.digen.sampling, what), what
    assert small.digen.placement == plan.digen.placement and small.digen.tsp.enable == plan.digen.tsp.enable


@pytest.mark.parametrize("name", NAMES)
def test_what_is_left_to_the_user(name):
    recipe = composed(name).recipe
    assert {key for key in recipe if OmegaConf.is_missing(recipe, key)} == {*MANDATORY, "reward_file"}


@pytest.mark.parametrize("missing", MANDATORY)
def test_a_value_that_was_not_given_is_named(missing, filled):
    with pytest.raises((ValueError, MissingMandatoryValue), match=MANDATORY[missing]):
        resolve_plan(filled("sd35_medium_flow_grpo", without=missing))


@pytest.mark.parametrize("name", NAMES)
def test_recipe_states_its_source_and_that_it_was_not_run(name):
    head = (RECIPES / f"{name}.yaml").read_text().split("defaults:")[0]
    assert f"--config-name {name}" in head
    assert "Not run on GPUs" in head.replace("\n# ", " ")
    assert "Source:" in head or "base recipe" in head


# ---- the published numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        # prompts, n, prompts per optimizer step, transitions, Trainer ranks, replicas, clip, KL
        ("sd35_medium_flow_grpo", (48, 24, 24, 9, 8, 8, 1e-4, 0.04)),
        ("sd35_medium_flow_grpo_disaggregated", (48, 24, 24, 9, 4, 4, 1e-4, 0.04)),
        ("sd35_medium_flow_grpo_fast", (48, 24, 24, 3, 8, 8, 1e-5, 0.0)),
        ("sd35_medium_verl_omni", (8, 8, 4, 3, 2, 2, 1e-5, 0.0)),
        ("sd35_large_flow_grpo", (48, 24, 24, 9, 4, 4, 1e-4, 0.04)),
        ("flux_dev_flow_grpo", (32, 24, 32, 5, 4, 4, 1e-4, 0.0)),
        ("qwen_image_flow_grpo", (32, 16, 32, 2, 8, 8, 1e-5, 0.0)),
        ("qwen_image_full", (32, 16, 16, 2, 16, 16, 1e-5, 0.0)),
        ("wan21_1_3b_flow_grpo", (32, 4, 32, 19, 4, 4, 1e-3, 0.004)),
        ("wan21_14b_dance_grpo", (16, 24, 16, 11, 16, 16, 1e-4, 0.0)),
        ("hunyuanvideo_dance_grpo", (16, 24, 16, 9, 16, 16, 1e-4, 0.0)),
    ],
)
def test_sizes(name, sizes, filled):
    plan = resolve_plan(filled(name))
    found = (plan.prompts, plan.n, plan.prompts_per_batch, plan.transitions, plan.trainer_ranks, plan.replicas)
    assert (*found, plan.clip_low, plan.kl_beta) == sizes
    assert plan.clip_high == plan.clip_low


def test_guidance_and_kernel_of_the_fast_recipes(filled):
    for name in ("sd35_medium_flow_grpo_fast", "sd35_medium_verl_omni"):
        sampling = resolve_plan(filled(name)).digen.sampling
        assert (sampling.kind, sampling.eta, sampling.guidance_scale) == ("cps", 0.8, 1.0)
        assert sampling.selection.window_range == [0, 5]


def test_the_disaggregated_recipe_streams(filled):
    plan = resolve_plan(filled("sd35_medium_flow_grpo_disaggregated"))
    assert not plan.one_shot and plan.fragment_size == plan.n and plan.digen.tsp.enable
    assert plan.notes == ()


def test_a_recipe_runs_with_a_bundled_reward_instead(filled):
    """The override that docs/rewards.md gives."""
    config = filled(
        "sd35_medium_verl_omni",
        "~trainer.v1.digen.rewards.user",
        "+trainer.v1.digen.rewards.jpeg_compressibility.weight=1.0",
    )
    check_unread(config)
    assert list(resolve_plan(config).digen.rewards) == ["jpeg_compressibility"]


def test_reward_hacking_is_the_digits_recipe_without_its_brakes():
    """Same data, model, reward and judges; what differs is the KL, the learning rate and where the run goes."""

    def flat(node, prefix=""):
        if not isinstance(node, dict):
            return {prefix: node}
        return {k: v for key, value in node.items() for k, v in flat(value, f"{prefix}.{key}").items()}

    tame, hacked = (flat(OmegaConf.to_container(composed(n))) for n in ("digits", "digits_reward_hacking"))
    differing = {name.strip("."): (tame[name], hacked[name]) for name in tame if tame[name] != hacked[name]}
    assert tame.keys() == hacked.keys()
    assert differing == {
        "actor_rollout_ref.actor.use_kl_loss": (True, False),
        "actor_rollout_ref.actor.optim.lr": (6e-4, 1e-3),
        "trainer.total_training_steps": (16, 20),  # equal time: a step without the KL is shorter
        "trainer.test_freq": (8, 10),
        "trainer.save_freq": (16, 20),
        "trainer.experiment_name": ("flow_grpo", "reward_hacking"),
        "trainer.default_local_dir": ("runs/digits", "runs/digits_reward_hacking"),
    }
