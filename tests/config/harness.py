"""The digits recipe with its files, composed as ``main_ppo`` does; shared by the tests that need a configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
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
    """``digits(*overrides)`` composes the recipe and resolves it; ``resolve=False`` keeps interpolations."""

    def compose(*overrides: str, resolve: bool = True) -> DictConfig:
        return compose_digits(digits_dir, *overrides, resolve=resolve)

    return compose


def compose_digits(digits_dir: Path, *overrides: str, resolve: bool = True) -> DictConfig:
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(config_dir=str(RECIPES), version_base=None):
        config = compose(
            "digits",
            overrides=[
                "hydra.searchpath=[pkg://verl.trainer.config,pkg://verl_digen.config]",
                f"recipe.digits_dir={digits_dir}",
                *overrides,
            ],
        )
    if resolve:
        with open_dict(config):
            config.transfer_queue.enable = True  # as main_ppo does before it builds the trainer
        OmegaConf.resolve(config)
    return config
