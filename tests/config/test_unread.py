"""Options that a diffusion run ignores are errors when they are set, and only those (I10)."""

from __future__ import annotations

import fnmatch

import pytest
from omegaconf import OmegaConf

from verl_digen.config.unread import READ, WRITTEN, _defaults, check_unread, leaves, unread_options

# Leaves below these patterns are the user's own: veRL's defaults have none.
DYNAMIC = {"recipe.*"}


@pytest.mark.parametrize("resolve", [False, True])
def test_the_recipe_itself_has_no_unread_option(digits, resolve):
    check_unread(digits(resolve=resolve))


# override -> the leaf that must be refused
UNREAD = {
    "actor_rollout_ref.actor.entropy_coeff=0.1": "actor_rollout_ref.actor.entropy_coeff",
    "data.max_prompt_length=7": "data.max_prompt_length",
    "actor_rollout_ref.rollout.temperature=0.5": "actor_rollout_ref.rollout.temperature",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "critic.enable=true": "critic.enable",
    "algorithm.gamma=0.9": "algorithm.gamma",
    "algorithm.norm_adv_by_std_in_grpo=false": "algorithm.norm_adv_by_std_in_grpo",
    "reward.reward_model.enable=true": "reward.reward_model.enable",
    "trainer.v1.sampler.max_off_policy_threshold=3": "trainer.v1.sampler.max_off_policy_threshold",
    "trainer.log_val_generations=4": "trainer.log_val_generations",
    "global_profiler.steps=[1,2]": "global_profiler.steps",
    # the default follows another option; given a value of its own it is as unread as any other
    "actor_rollout_ref.rollout.response_length=9": "actor_rollout_ref.rollout.response_length",
    "actor_rollout_ref.actor.checkpoint.load_contents=[model]": "actor_rollout_ref.actor.checkpoint.load_contents",
    # names that veRL does not know
    "+data.image_size=64": "data.image_size",
    "+trainer.v1.digen_tag.enable=true": "trainer.v1.digen_tag.enable",
}

READ_OVERRIDES = (
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.clip_ratio_low=1e-5",
    "actor_rollout_ref.actor.ppo_mini_batch_size=5",  # critic.ppo_mini_batch_size follows it
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",  # load_contents follows it
    "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=1",
    "actor_rollout_ref.rollout.n=4",
    "data.shuffle=false",
    "data.train_batch_size=5",
    "reward.num_workers=2",
    "ray_kwargs.ray_init.num_cpus=3",
    "trainer.project_name=other",  # default_local_dir and trace.project_name follow it
    "trainer.n_gpus_per_node=2",  # rollout.n_gpus_per_node follows it
    "trainer.v1.digen.gap.enable=true",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=2",
    "recipe.digits_dir=elsewhere",
    "+recipe.anything=1",
)


@pytest.mark.parametrize("resolve", [False, True])
def test_exactly_the_changed_options_that_nothing_reads_are_found(digits, resolve):
    """Among options that are read, and without those that follow a changed one by interpolation."""
    config = digits(*UNREAD, *READ_OVERRIDES, resolve=resolve)
    assert set(unread_options(config)) == set(UNREAD.values())
    with pytest.raises(ValueError) as error:
        check_unread(config)
    for name in UNREAD.values():
        value = OmegaConf.select(config, name)
        assert f"{name}={OmegaConf.to_container(value) if OmegaConf.is_config(value) else value!r}" in str(error.value)
    assert "data.max_prompt_length=7 (default 512)" in str(error.value)
    assert "rollout.response_length=9 (default 512)" in str(error.value)


@pytest.mark.parametrize("resolve", [False, True])
def test_read_options_are_accepted(digits, resolve):
    check_unread(digits(*READ_OVERRIDES, resolve=resolve))


def test_a_default_written_out_is_no_change(digits):
    check_unread(digits("data.max_prompt_length=512", "actor_rollout_ref.actor.entropy_coeff=0"))


def test_the_check_leaves_the_configuration_alone(digits):
    config = digits(resolve=False)
    before = OmegaConf.to_yaml(config)
    check_unread(config)
    assert OmegaConf.to_yaml(config) == before


@pytest.mark.parametrize("pattern", READ + WRITTEN)
def test_every_pattern_names_an_option_that_exists(pattern):
    written, _ = _defaults()
    assert pattern in DYNAMIC or fnmatch.filter(written, pattern), f"{pattern} matches no option of veRL or ours"


def test_leaves():
    config = OmegaConf.create({"a": {"b": 1, "c": {}, "d": [1, {"e": 2}]}, "f": "${a.b}", "g": None})
    assert leaves(config) == {"a.b": 1, "a.d": [1, {"e": 2}], "f": "${a.b}", "g": None}
