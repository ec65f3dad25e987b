"""Hydra finds verl_digen's groups and recipes without flags: ``main_ppo --config-name digits``, ``+digen=default``.

Hydra discovers plugins in the namespace package ``hydra_plugins``; ``setup.py`` maps that name to this
folder, which for that reason has no ``__init__.py``. The paths are appended last, so that no configuration
of another package or of the user is ever shadowed.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from verl_digen.shipped import shipped


class VerlDigenSearchPath(SearchPathPlugin):
    """Appends ``pkg://verl_digen.config`` and the folder of the recipes to Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="verl_digen", path="pkg://verl_digen.config")
        if shipped("recipes").is_dir():
            search_path.append(provider="verl_digen", path=f"file://{shipped('recipes')}")
