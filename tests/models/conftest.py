"""Model folders for the tests: a tiny random SD3.5 in the diffusers layout, and the shipped digits model."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_digen.models.tiny import build_tiny


@pytest.fixture(scope="session")
def build_sd3():
    """``build_sd3(path, **scheduler_options)`` writes a tiny SD3.5 to ``path``."""
    return lambda path, **scheduler_options: build_tiny("sd3", path, **scheduler_options)


@pytest.fixture(scope="session")
def sd3_path(tmp_path_factory) -> Path:
    return build_tiny("sd3", tmp_path_factory.mktemp("sd3"))


@pytest.fixture(scope="session")
def digits_path() -> Path:
    from verl_digen.models.digits import ASSETS

    return ASSETS
