"""The digits recipe with its files, composed as ``main_ppo`` does; shared by the tests that need a configuration."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@pytest.fixture(scope="session")
def digits_dir(tmp_path_factory) -> Path:
    """Model and prompts as ``verl-digen prepare digits`` writes them."""
    from verl_digen.data.digits import write_digits_prompts
    from verl_digen.models.digits import ensure_digits_model

    folder = tmp_path_factory.mktemp("digits")
    ensure_digits_model(folder / "model")
    write_digits_prompts(folder)
    return folder


@pytest.fixture(scope="session")
def digits(digits_dir):
    """``digits(*overrides)`` is the recipe with overrides, resolved; ``resolve=False`` keeps interpolations.

    The recipe is composed once; overrides in Hydra's syntax are applied to copies, which is many times faster.
    """
    base = compose_digits(digits_dir)

    def make(*overrides: str, resolve: bool = True) -> DictConfig:
        config = copy.deepcopy(base)
        for override in OverridesParser.create().parse_overrides(list(overrides)):
            if override.is_delete():
                section, _, key = override.key_or_group.rpartition(".")
                with open_dict(config):
                    OmegaConf.select(config, section).pop(key)
            else:
                OmegaConf.update(config, override.key_or_group, override.value(), force_add=override.is_add())
        if resolve:
            resolve_as_main_ppo(config)
        return config

    return make


def resolve_as_main_ppo(config: DictConfig) -> None:
    with open_dict(config):
        config.transfer_queue.enable = True
    OmegaConf.resolve(config)


def compose_digits(digits_dir: Path, *overrides: str) -> DictConfig:
    with initialize_config_dir(config_dir=str(RECIPES), version_base=None):
        return compose(
            "digits",
            overrides=[
                "hydra.searchpath=[pkg://verl.trainer.config,pkg://verl_digen.config]",
                f"recipe.digits_dir={digits_dir}",
                *overrides,
            ],
        )
