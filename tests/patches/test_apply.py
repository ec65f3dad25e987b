"""Every patch applies to the released veRL with git's and patch's own tools, alone and with the others."""

from __future__ import annotations

import re
import shutil
import subprocess
from email import message_from_string
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.patches.conftest import PATCHES, git_apply, touched_paths


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.fixture(params=PATCHES, ids=lambda path: path.stem)
def patch(request) -> Path:
    return request.param


def test_there_are_patches():
    assert len(PATCHES) == 9


def test_git_applies_each_alone_and_takes_it_back(verl_copy, patch):
    before = contents(verl_copy)
    assert git_apply(verl_copy, "--check", patch).returncode == 0
    assert git_apply(verl_copy, patch).returncode == 0
    changed = {path for path, content in contents(verl_copy).items() if content != before[path]}
    assert changed == set(touched_paths(patch))
    for path in changed:
        compile((verl_copy / path).read_bytes(), path, "exec")
    assert git_apply(verl_copy, "--check", patch).returncode != 0, "a patch cannot go in twice"
    assert git_apply(verl_copy, "--reverse", patch).returncode == 0
    assert contents(verl_copy) == before


@pytest.mark.skipif(shutil.which("patch") is None, reason="the command patch is not installed")
def test_patch_applies_each_without_fuzz(verl_copy, patch):
    before = contents(verl_copy)
    command = ["patch", "-p1", "--forward", "--fuzz=0", "--input", patch]
    dry = subprocess.run([*command, "--dry-run"], cwd=verl_copy, capture_output=True, text=True)
    assert dry.returncode == 0, dry.stdout
    assert contents(verl_copy) == before
    assert subprocess.run(command, cwd=verl_copy, capture_output=True).returncode == 0
    assert subprocess.run([*command[:2], "--reverse", *command[3:]], cwd=verl_copy, capture_output=True).returncode == 0
    assert contents(verl_copy) == before


def test_all_together_apply_in_either_order_and_compile(verl_copy, patched):
    for patch in reversed(PATCHES):
        assert git_apply(verl_copy, patch).returncode == 0, patch.stem
    assert contents(verl_copy) == contents(patched)
    for path in {path for patch in PATCHES for path in touched_paths(patch)}:
        compile((patched / path).read_bytes(), path, "exec")


def test_lines_that_are_not_as_released_are_refused_and_nothing_is_written(verl_copy, patch):
    for path in touched_paths(patch):
        file = verl_copy / path
        file.write_text(re.sub(r"(?m)$", "  # mine", file.read_text()))
    before = contents(verl_copy)
    assert git_apply(verl_copy, patch).returncode != 0
    assert contents(verl_copy) == before


def test_each_names_its_reason_the_version_and_the_change_upstream(patch):
    header = message_from_string(patch.read_text().partition("\n--- ")[0])
    assert all(header[name] for name in ("Subject", "Verl-Version", "Why", "Upstream"))
    assert header["Verl-Version"] == version("verl")
    assert all(path.startswith("verl/") for path in touched_paths(patch))


def test_every_patch_has_a_row_in_the_readme_and_a_test_of_its_behaviour():
    readme = (PATCHES[0].parent / "README.md").read_text()
    rows = [line.split("`")[1] for line in readme.splitlines() if line.startswith("| `") and line.count("|") == 4]
    assert sorted(rows) == [patch.stem for patch in PATCHES]
    tests = (Path(__file__).parent / "test_behaviour.py").read_text()
    missing = [patch.stem for patch in PATCHES if f"def test_{patch.stem.replace('-', '_')}(" not in tests]
    assert not missing
