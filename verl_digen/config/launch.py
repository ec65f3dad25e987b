"""What must be so in the process that starts Ray, before it does: a Hydra callback of ``digen: default``."""

from __future__ import annotations

import os
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class BeforeRay(Callback):
    """Called by Hydra in ``main_ppo`` when the configuration is composed."""

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """A run on the CPU declares its devices to Ray, which refuses more than ``CUDA_VISIBLE_DEVICES`` lists.

        Batch systems set it to nothing (or ``NoDevFiles``) on machines without a GPU.
        """
        if config.trainer.device == "cpu":
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
