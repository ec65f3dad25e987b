"""What a run leaves about itself: ``about.json`` (plan, settings, versions) and ``warnings.log`` in its folder.

``verl-digen report`` reads both.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import re
import time
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

ABOUT, WARNINGS = "about.json", "warnings.log"
SECRET = re.compile(r"(^|_)(token|secret|password|passwd|(api|access)_?key|credentials?)(_|$)", re.IGNORECASE)
PACKAGES = ("verl-digen", "verl", "torch", "diffusers", "ray", "TransferQueue")


def write_about(trainer, plan: list[tuple[str, str]]) -> Path:
    """Write both files of a run that starts; a resumed run replaces the first and adds to the second.

    Args:
        plan: (what, value) as printed at start.
    """
    config = trainer.config
    folder = Path(config.trainer.default_local_dir)
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "project": config.trainer.project_name,
        "experiment": config.trainer.experiment_name,
        "plan": plan,
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "metrics_log": file_logger_path(config),
        "settings": without_secrets(OmegaConf.to_container(config, resolve=True)),
    }
    partial = folder / f".{os.getpid()}.{ABOUT}"
    partial.write_text(json.dumps(about, indent=1, default=str))
    os.replace(partial, folder / ABOUT)
    keep_warnings(folder / WARNINGS)
    return folder / ABOUT


def file_logger_path(config) -> str | None:
    """Where veRL's ``file`` logger writes, absolute; None if ``trainer.logger`` does not have it."""
    if "file" not in config.trainer.logger:
        return None
    default = Path(os.environ.get("VERL_FILE_LOGGER_ROOT", ".")).expanduser() / config.trainer.project_name
    chosen = os.environ.get("VERL_FILE_LOGGER_PATH", default / f"{config.trainer.experiment_name}.jsonl")
    return os.path.abspath(chosen)


def without_secrets(value: Any, name: str = "") -> Any:
    """The settings with ``***`` for every value whose name sounds like a secret: the page may be passed on."""
    if isinstance(value, dict):
        return {key: without_secrets(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_secrets(inner, name) for inner in value]
    return "***" if isinstance(value, str) and SECRET.search(name) else value


def keep_warnings(file: Path) -> None:
    """Let the driver's warnings and errors of this package also go to ``file``; another run's file is let go."""
    root = logging.getLogger("verl_digen")
    for handler in [h for h in root.handlers if isinstance(h, logging.FileHandler)]:
        root.removeHandler(handler)
        handler.close()
    handler = logging.FileHandler(file, delay=True)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S"))
    root.addHandler(handler)
