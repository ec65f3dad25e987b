"""Paths in a configuration: ``~`` stands for the home folder in every option; any path can be given as an override."""

from __future__ import annotations

import os
import re
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf


def expand_home(config: DictConfig | ListConfig) -> None:
    """Put the home folder in the place of the ``~`` that begins a text value (``~/...`` or ``~``), in place."""
    for key in config.keys() if isinstance(config, DictConfig) else range(len(config)):
        if OmegaConf.is_missing(config, key):
            continue
        value = config[key]
        if isinstance(value, DictConfig | ListConfig):
            expand_home(value)
        elif isinstance(value, str) and (value == "~" or value.startswith("~/")):
            config[key] = os.path.expanduser(value)


def override(option: str, text: Any) -> str:
    """``option=text`` in Hydra's grammar, with ``text`` taken as it is: quotes, brackets, ``=`` and ``$`` mean nothing.

    Inside single quotes Hydra reads a backslash only before a quote, and OmegaConf reads ``${``.
    """
    plain = re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", str(text))
    quoted = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), plain)
    return f"{option}='{quoted}'"
