"""Options of veRL that a diffusion run does not read are errors when they are set (I10).

The configuration is compared with what veRL's ``ppo_trainer`` and our ``digen: default`` give without any override. A
leaf that differs must be one that this plugin, or veRL code that a diffusion run goes through, reads.
"""

from __future__ import annotations

import fnmatch
from functools import cache
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_digen.shipped import verl_config_folder

# Patterns of the leaves that a diffusion run reads.
READ = (
    "actor_rollout_ref.actor.checkpoint.save_contents*",
    "actor_rollout_ref.actor.clip_ratio",
    "actor_rollout_ref.actor.clip_ratio_high",
    "actor_rollout_ref.actor.clip_ratio_low",
    "actor_rollout_ref.actor.fsdp_config.fsdp_size",
    "actor_rollout_ref.actor.fsdp_config.offload_policy",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload",
    "actor_rollout_ref.actor.fsdp_config.param_offload",
    "actor_rollout_ref.actor.fsdp_config.reshard_after_forward",
    "actor_rollout_ref.actor.kl_loss_coef",
    "actor_rollout_ref.actor.optim.betas*",
    "actor_rollout_ref.actor.optim.clip_grad",
    "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.actor.optim.lr_scheduler_type",
    "actor_rollout_ref.actor.optim.lr_warmup_steps",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio",
    "actor_rollout_ref.actor.optim.min_lr_ratio",
    "actor_rollout_ref.actor.optim.num_cycles",
    "actor_rollout_ref.actor.optim.optimizer",
    "actor_rollout_ref.actor.optim.optimizer_impl",
    "actor_rollout_ref.actor.optim.override_optimizer_config*",
    "actor_rollout_ref.actor.optim.weight_decay",
    "actor_rollout_ref.actor.optim.zero_indexed_step",
    "actor_rollout_ref.actor.policy_loss.loss_mode",
    "actor_rollout_ref.actor.ppo_epochs",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.use_kl_loss",
    "actor_rollout_ref.model.*",
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.n_gpus_per_node",
    "actor_rollout_ref.rollout.nnodes",
    "actor_rollout_ref.rollout.val_kwargs.n",
    "data.seed",
    "data.shuffle",
    "data.train_batch_size",
    "data.train_files*",
    "data.val_files*",
    "ray_kwargs.*",
    "recipe.*",  # a recipe's own variables, for its interpolations
    "reward.custom_reward_function.*",
    "reward.num_workers",
    "trainer.default_local_dir",
    "trainer.device",
    "trainer.experiment_name",
    "trainer.logger*",
    "trainer.max_actor_ckpt_to_keep",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "trainer.project_name",
    "trainer.resume_from_path",
    "trainer.resume_mode",
    "trainer.rollout_data_dir",
    "trainer.save_freq",
    "trainer.test_freq",
    "trainer.total_epochs",
    "trainer.total_training_steps",
    "trainer.v1.digen.*",
    "trainer.val_before_train",
    "trainer.val_only",
    "trainer.validation_data_dir",
    "transfer_queue.*",
)
# veRL's loop and our own start-up write these.
WRITTEN = ("transfer_queue.enable", "actor_rollout_ref.actor.optim.total_training_steps")


def leaves(config: Any, prefix: str = "") -> dict[str, Any]:
    """Leaf values by dotted name. Interpolations are kept as their text."""
    if isinstance(config, DictConfig | ListConfig):
        config = OmegaConf.to_container(config, resolve=False)
    out: dict[str, Any] = {}
    if isinstance(config, dict) and config:
        for key, value in config.items():
            out |= leaves(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(config, list):
        out[prefix] = list(config)
    elif config != {}:
        out[prefix] = config
    return out


@cache
def _defaults() -> tuple[dict[str, Any], dict[str, Any]]:
    """Leaves of the defaults: as written (interpolations as text), and resolved."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    running = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(verl_config_folder()), version_base=None):
            config = compose(
                config_name="ppo_trainer",
                overrides=["hydra.searchpath=[pkg://verl_digen.config]", "+digen=default"],
            )
    finally:
        GlobalHydra.instance().clear()
        if running is not None:
            GlobalHydra.instance().initialize(running)
    written = leaves(config)
    for key in OmegaConf.missing_keys(config):
        OmegaConf.update(config, key, None)
    return written, leaves(OmegaConf.create(OmegaConf.to_container(config, resolve=True)))


def unread_options(config: DictConfig) -> dict[str, tuple[Any, Any]]:
    """Leaves that were changed and that nothing reads: name -> (default, value).

    A leaf whose default is an interpolation is compared with what that interpolation gives in ``config``.
    """
    written, resolved = _defaults()
    plain = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
    changed = {}
    for name, value in leaves(plain).items():
        if value == "???" or (name in resolved and resolved[name] == value):
            continue
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in READ + WRITTEN):
            continue
        default = resolved.get(name)
        text = written.get(name)
        if isinstance(text, str) and "${" in text:
            default = _interpolated(plain, name, text)
        if value != default:
            changed[name] = (default, value)
    return changed


def _interpolated(plain: DictConfig, name: str, text: str) -> Any:
    """What the interpolation ``text`` gives at ``name``; ``plain`` is left as it was."""
    own = OmegaConf.select(plain, name)
    OmegaConf.update(plain, name, text)
    value = OmegaConf.select(plain, name)
    value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    OmegaConf.update(plain, name, own)
    return value


def check_unread(config: DictConfig) -> None:
    """Refuse a configuration with options that a diffusion run would ignore.

    Raises:
        ValueError: names every such option with its default and the value given.
    """
    changed = unread_options(config)
    if changed:
        listing = "; ".join(f"{name}={value!r} (default {default!r})" for name, (default, value) in changed.items())
        raise ValueError(
            f"options that a diffusion run (trainer.v1.trainer_mode=digen) does not read: {listing}. Remove them, or "
            "set the option under trainer.v1.digen or actor_rollout_ref.model that does what you mean"
        )
