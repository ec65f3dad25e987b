"""``verl-digen report``: one self-contained HTML page of a run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="trainer.default_local_dir of the run")
    parser.add_argument("--out", type=Path, help="file to write (default: RUN_DIR/report.html)")
    parser.add_argument("--log", type=Path, help="JSON lines of veRL's file logger (default: where the run says)")


def run(args: argparse.Namespace) -> int:
    """Exit status: 0 written, 2 nothing to report."""
    from verl_digen.bench.report import write_report
    from verl_digen.bench.runlog import RunLogError

    try:
        file = write_report(args.run_dir, args.out, args.log)
    except (RunLogError, OSError) as error:
        print(f"verl-digen report: {error}", file=sys.stderr)
        return 2
    print(f"report: {file.resolve()}")
    return 0
