"""``verl-digen check``: compose a recipe, make every check of a start, print the plan. Nothing is started.

The recipe is composed as ``main_ppo`` does it, with the same search path, so the names of the shipped recipes work in
any folder.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from verl_digen.shipped import verl_config_folder

# Hydra would write folders and logs of a job otherwise.
_NO_FILES = ("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=stdout")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="name of a shipped recipe, or a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="as main_ppo takes them")


def run(args: argparse.Namespace) -> int:
    """Exit status: 0 sound, 1 refused (the error is on stderr)."""
    import hydra

    arguments = ["--config-name", args.recipe]
    if args.recipe.endswith((".yaml", ".yml")):
        file = Path(args.recipe).expanduser().resolve()
        if not file.is_file():
            print(f"verl-digen check: {file} does not exist", file=sys.stderr)
            return 1
        arguments = ["--config-dir", str(file.parent), "--config-name", file.stem]
    # composed before veRL is imported: a wrong option name is an error in a second
    main = hydra.main(config_path=str(verl_config_folder()), config_name="ppo_trainer", version_base=None)(_show)
    before = sys.argv
    sys.argv = [before[0], *arguments, *args.overrides, *_NO_FILES]
    try:
        main()
    finally:
        sys.argv = before
    return 0


def _show(config) -> None:
    from verl_digen.trainer.check import check_run, print_plan

    try:
        rows = check_run(config)
    except ValueError as error:  # a recipe without our group has no callback that would have said so
        raise SystemExit(f"verl-digen check: {error}") from error
    print_plan(rows)
    print("sound: this run would start")
