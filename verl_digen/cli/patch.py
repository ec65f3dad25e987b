"""``verl-digen patch``: check, apply or revert the optional patches to veRL."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from verl_digen import patching

CANNOT_WRITE = "if veRL belongs to another user or is read-only, install it into a virtual environment of your own"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="say how each patch stands; writes nothing (default)")
    action.add_argument("--apply", action="store_true", help="apply the patches that are not applied yet")
    action.add_argument("--revert", action="store_true", help="take the patches back, byte for byte")
    parser.add_argument(
        "--target", metavar="DIR", help="the directory that holds the verl package (default: the installed veRL)"
    )
    parser.add_argument(
        "--only", metavar="NAME", action="append", default=[], help="this patch only; may be given more than once"
    )


def run(args: argparse.Namespace) -> int:
    """Exit status: 0 done (or nothing to do), 1 a patch does not fit or the files cannot be written."""
    try:
        patches = patching.load_patches(args.only)
        root = patching.find_verl(args.target)
        if args.apply or args.revert:
            return _change(patches, root, revert=args.revert)
        return _check(patches, root)
    except (patching.PatchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        if isinstance(error, PermissionError):
            print(CANNOT_WRITE, file=sys.stderr)
        return 1


def _check(patches: Sequence[patching.Patch], root: Path) -> int:
    statuses = patching.check(patches, root)
    print(f"veRL {patching.verl_version(root)} in {root}")
    width = max(len(patch.name) for patch in patches)
    for status in statuses:
        patch = status.patch
        print(f"{status.state.value:<12}  {patch.name:<{width}}  for veRL {patch.verl_version}  {patch.subject}")
        for reason in status.reasons:
            print(f"{'':<12}  {reason}")
    return int(any(status.state is patching.State.DOES_NOT_FIT for status in statuses))


def _change(patches: Sequence[patching.Patch], root: Path, *, revert: bool) -> int:
    changed = patching.revert(patches, root) if revert else patching.apply(patches, root)
    done, left = ("reverted", "was not applied") if revert else ("applied", "was applied already")
    print(f"veRL {patching.verl_version(root)} in {root}")
    for patch in patches:
        print(f"{patch.name}: {done if patch in changed else left}")
    if not changed:
        print("nothing to do")
    return 0
