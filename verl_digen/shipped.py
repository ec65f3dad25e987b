"""Folders of data, found without importing what they belong to: our ``recipes`` and ``patches``, veRL's configuration.

Imported by Hydra's search-path plugin in every program that uses Hydra: standard library only, and nothing is raised.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path


def shipped(name: str) -> Path:
    """A folder that the package ships: inside the installed package, else at the top of the source tree.

    It may be absent.
    """
    package = Path(__file__).resolve().parent
    installed, source = package / name, package.parent / name
    return source if not installed.is_dir() and (package.parent / "setup.py").is_file() else installed


def verl_config_folder() -> Path:
    """veRL's configuration groups. Importing veRL to find them would take seconds.

    Raises:
        ModuleNotFoundError: veRL is not installed.
    """
    spec = importlib.util.find_spec("verl")
    if spec is None:
        raise ModuleNotFoundError("verl is not installed in this environment")
    return Path(spec.submodule_search_locations[0]) / "trainer" / "config"
