"""The checks of a run without the run: what ``main_ppo`` refuses before Ray starts, and ``verl-digen check`` prints.

``digen: default`` names :class:`CheckBeforeStart` as a callback of Hydra, which calls it between composing the
configuration and veRL's ``main``. Nothing is started, no weights are read and no device is taken. Take it out with
``~hydra.callbacks.digen_check`` where the machine that launches a run does not see the files of the cluster: the
driver makes the same checks when it starts.
"""

from __future__ import annotations

import copy
import traceback
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict
from rich.console import Console
from rich.table import Table

from verl_digen.config.plan import resolve_plan
from verl_digen.config.unread import check_unread

MODE = "digen"


def check_run(config: DictConfig) -> list[tuple[str, str]]:
    """Check a composed configuration as ``main_ppo`` and then the trainer do; ``config`` is left as it is.

    Returns:
        The resolved plan as (what, value).

    Raises:
        ValueError: with the numbers that disagree and the option to change.
    """
    if config.trainer.v1.trainer_mode != MODE:
        raise ValueError(f"trainer.v1.trainer_mode={config.trainer.v1.trainer_mode}: only {MODE} runs are checked")
    missing = [name for name in OmegaConf.missing_keys(config) if name.startswith("recipe.")]
    if missing:
        raise ValueError(f"the recipe needs a value for {', '.join(sorted(missing))}: give them as NAME=VALUE")
    config = copy.deepcopy(config)
    check_unread(config)  # these two before veRL is imported, which takes seconds
    OmegaConf.resolve(config)
    resolve_plan(config)

    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    from verl_digen.trainer.trainer import DigenTrainer

    auto_set_device(config)
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    with open_dict(config):
        config.transfer_queue.enable = True
    trainer = DigenTrainer(config)
    trainer.check()
    return trainer.plan_rows()


def print_plan(rows: list[tuple[str, str]]) -> None:
    """Write the plan as a table."""
    table = Table(title="verl_digen: resolved plan", show_header=False)
    for what, value in rows:
        table.add_row(what, value)
    Console(width=120).print(table)


class CheckBeforeStart(Callback):
    """Ends the program with the error of :func:`check_run` before veRL starts anything.

    Hydra turns what a callback raises into a warning and goes on; only ``SystemExit`` ends the program.
    """

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        config = copy.deepcopy(config)
        with open_dict(config):
            config.pop("hydra", None)
        if config.trainer.v1.trainer_mode != MODE:
            return
        try:
            check_run(config)
        except ValueError as error:
            raise SystemExit(f"verl_digen: nothing was started: {error}") from error
        except Exception as error:
            traceback.print_exc()
            raise SystemExit("verl_digen: nothing was started: the checks of the configuration failed") from error
