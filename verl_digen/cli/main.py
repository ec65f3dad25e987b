"""Entry point of the ``verl-digen`` command.

Each subcommand is a module of this folder with two functions, ``add_arguments(parser)`` and
``run(args) -> int`` (the exit status). The module is imported only when its subcommand is called, so
that ``verl-digen simulate`` needs neither torch nor verl.
"""

from __future__ import annotations

import argparse
import importlib
import sys

COMMANDS = {
    "doctor": "versions, devices, what is registered with veRL, what is missing and how to get it",
    "check": "compose a recipe, make every check of a start, print the plan; starts nothing",
    "prepare": "write the digits model and its prompt files; rebuild the shipped weights",
    "export": "a checkpoint's weights as stock diffusers and peft load them",
    "plan": "search pool split, fragment and tile size, policy for a workload",
    "simulate": "run the schedule of a workload in the discrete-event simulator",
    "bench": "measure the live modes against a bare loop",
    "report": "one self-contained HTML page of a run",
}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="verl-digen", description=__doc__.splitlines()[0])
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        if argv and argv[0] == name:
            importlib.import_module(f"verl_digen.cli.{name}").add_arguments(subparser)
    args = parser.parse_args(argv)
    return importlib.import_module(f"verl_digen.cli.{args.command}").run(args)


if __name__ == "__main__":
    sys.exit(main())
