"""Every model recipe composes, is accepted by the plan and sets nothing that a diffusion run does not read (I10).

Its ``???`` values are filled with a tiny SD3 transformer and small prompt files. What is not covered: the memory that a
recipe needs on a real device, and whether it learns.
"""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import MissingMandatoryValue

from verl_digen.config.plan import resolve_plan
from verl_digen.config.unread import check_unread

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml") if path.stem != "digits")
# what a recipe leaves to the user -> the option that takes it, which the error names
MANDATORY = {
    "model_dir": "actor_rollout_ref.model.path",
    "train_files": "data.train_files",
    "val_files": "data.val_files",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """A folder that the plan takes for SD3.5 (index, a tiny transformer, schedule), prompts, and a reward file."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel

    from verl_digen.data.digits import write_digits_prompts

    folder = tmp_path_factory.mktemp("recipes")
    model = folder / "model"
    SD3Transformer2DModel(
        sample_size=64,
        patch_size=2,
        in_channels=16,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=32,
        out_channels=16,
        pos_embed_max_size=64,
    ).save_pretrained(model / "transformer")
    FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(model / "scheduler")
    index = {
        "_class_name": "StableDiffusion3Pipeline",
        "transformer": ["diffusers", "SD3Transformer2DModel"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    }
    (model / "model_index.json").write_text(json.dumps(index))
    prompts = write_digits_prompts(folder)
    reward = folder / "reward.py"
    reward.write_text("def score(images, prompt, ground_truth, extra):\n    return {'score': 0.0}\n")
    return {
        "model_dir": model,
        "train_files": prompts["train"],
        "val_files": prompts["val"],
        "reward_file": reward,
    }


@cache
def composed(name: str, *overrides: str) -> DictConfig:
    """The recipe as ``main_ppo --config-dir recipes --config-name NAME`` composes it."""
    with initialize_config_dir(config_dir=str(RECIPES), version_base=None):
        return compose(name, overrides=["hydra.searchpath=[pkg://verl.trainer.config]", *overrides])


@pytest.fixture
def filled(files):
    """``filled(name, *overrides)``: the resolved recipe; ``without`` leaves one of its ``???`` values open."""

    def fill(name: str, *overrides: str, without: str = "") -> DictConfig:
        config = copy.deepcopy(composed(name, *overrides))
        for key, path in files.items():
            if key != without:
                config.recipe[key] = str(path)
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
def test_recipe_has_a_model_family(name, filled):
    """Only pipelines that a family covers; the size that the recipe asks for is one that SD3.5 medium can make."""
    from verl_digen.models.family import family_for

    config = filled(name)
    assert family_for(config.actor_rollout_ref.model.path).name == "sd3"
    sampling = config.trainer.v1.digen.sampling
    assert sampling.height % 16 == 0 and sampling.width % 16 == 0


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
