"""Check, apply and revert on a copy of the released files."""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from verl_digen import patching
from verl_digen.cli import patch as command
from verl_digen.patching import State

from .conftest import assert_released, snapshot, touched_paths

NAMES = [patch.name for patch in patching.load_patches()]


def states(root: Path, **kwargs) -> list[State]:
    return [status.state for status in patching.check(patching.load_patches(**kwargs), root)]


def cli(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(arguments))


def test_all_patches_apply_compile_and_revert_to_the_same_bytes(verl_copy):
    before = snapshot(verl_copy)
    patches = patching.load_patches()
    assert set(states(verl_copy)) == {State.NOT_APPLIED}
    assert patching.apply(patches, verl_copy) == patches
    assert set(states(verl_copy)) == {State.APPLIED}
    for path in touched_paths():
        source = (verl_copy / path).read_bytes()
        assert source != before[path]
        compile(source, path, "exec")
    assert set(patching.revert(patches, verl_copy)) == set(patches)
    assert snapshot(verl_copy) == before, "another file was left or a byte differs"
    assert_released(verl_copy)


@pytest.mark.parametrize("name", NAMES)
def test_each_patch_stands_alone(verl_copy, name):
    before = snapshot(verl_copy)
    (patch,) = patching.load_patches([name])
    patching.apply([patch], verl_copy)
    for other, state in zip(NAMES, states(verl_copy), strict=True):
        assert state is (State.APPLIED if other == name else State.NOT_APPLIED), other
    for file in patch.files:
        compile((verl_copy / file.path).read_bytes(), file.path, "exec")
    patching.revert([patch], verl_copy)
    assert snapshot(verl_copy) == before


@pytest.mark.parametrize("pair", itertools.permutations(["pool-accelerator-type", "pool-resource-name"]))
def test_patches_of_one_file_apply_and_revert_in_any_order(verl_copy, patched, pair):
    before = snapshot(verl_copy)
    for name in pair:
        patching.apply(patching.load_patches([name]), verl_copy)
    path = "verl/single_controller/ray/base.py"
    assert (verl_copy / path).read_bytes() == (patched / path).read_bytes()
    for name in pair:  # the first applied is the first reverted
        patching.revert(patching.load_patches([name]), verl_copy)
    assert snapshot(verl_copy) == before


@pytest.mark.skipif(shutil.which("git") is None, reason="compares with git apply")
def test_git_applies_the_same(verl_copy, patched):
    for name in NAMES:
        subprocess.run(["git", "apply", patching.patch_folder() / f"{name}.patch"], cwd=verl_copy, check=True)
    assert snapshot(verl_copy) == snapshot(patched)


def test_applying_or_reverting_twice_changes_nothing(verl_copy, capsys):
    for action, word in (("--apply", "was applied already"), ("--revert", "was not applied")):
        assert cli(action, "--target", str(verl_copy)) == 0
        once = snapshot(verl_copy)
        written = {path: path.stat().st_mtime_ns for path in verl_copy.rglob("*")}
        capsys.readouterr()
        assert cli(action, "--target", str(verl_copy)) == 0
        out = capsys.readouterr().out
        assert "nothing to do" in out and out.count(word) == len(NAMES)
        assert snapshot(verl_copy) == once
        assert written == {path: path.stat().st_mtime_ns for path in verl_copy.rglob("*")}


def test_apply_completes_what_was_applied_in_part_of_the_patches(verl_copy, patched):
    patching.apply(patching.load_patches(["prompt-uids"]), verl_copy)
    assert {patch.name for patch in patching.apply(patching.load_patches(), verl_copy)} == {*NAMES} - {"prompt-uids"}
    assert snapshot(verl_copy) == snapshot(patched)


def test_changes_of_others_away_from_the_hunks_are_kept(verl_copy):
    path = verl_copy / "verl/trainer/ppo/core_algos.py"
    path.write_bytes(b"# a line of the user, in Latin-1: \xe9\n" + path.read_bytes())
    before = snapshot(verl_copy)
    patching.apply(patching.load_patches(), verl_copy)
    assert path.read_bytes().startswith(b"# a line of the user, in Latin-1: \xe9\n")
    patching.revert(patching.load_patches(), verl_copy)
    assert snapshot(verl_copy) == before


def edit_file(root: Path, path: str, old: str, new: str) -> None:
    text = (root / path).read_text()
    assert text.count(old) == 1
    (root / path).write_text(text.replace(old, new))


def foreign_line(root: Path) -> None:
    edit_file(root, "verl/trainer/ppo/core_algos.py", "POLICY_LOSS_REGISTRY[name] = func", "REGISTRY[name] = func")


def partly_applied(root: Path) -> None:
    old = (
        'batch_dict["uid"] = np.array([str(uuid.uuid4()) for _ in range(len(batch_dict["raw_prompt"]))], dtype=object)'
    )
    new = 'batch_dict["uid"] = self._make_uids(batch_dict, partition_id="train")'
    edit_file(root, "verl/trainer/ppo/v1/trainer_base.py", old, new)


def missing_file(root: Path) -> None:
    (root / "verl/workers/rollout/base.py").unlink()


def other_version(root: Path) -> None:
    (root / patching.VERSION_FILE).write_text("0.9.2\n")


@pytest.mark.parametrize("action", ["--apply", "--revert"])
@pytest.mark.parametrize(
    ("spoil", "facts"),
    [
        (foreign_line, ["policy-loss-name", "verl/trainer/ppo/core_algos.py, hunk 1", "neither the released nor"]),
        (partly_applied, ["prompt-uids", "partly applied"]),
        (missing_file, ["rollout-registry", "verl/workers/rollout/base.py does not exist"]),
        (other_version, [*NAMES, "made for veRL 0.9.1, this is veRL 0.9.2"]),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(verl_copy, capsys, action, spoil, facts):
    if action == "--revert":
        patching.apply(patching.load_patches(["plugin-load-errors"]), verl_copy)
    spoil(verl_copy)
    before = snapshot(verl_copy)
    assert cli(action, "--target", str(verl_copy)) == 1
    error = capsys.readouterr().err
    assert all(fact in error for fact in [*facts, "nothing was written"]), error
    assert snapshot(verl_copy) == before
    assert cli("--check", "--target", str(verl_copy)) == 1
    assert f"does not fit  {facts[0]}" in capsys.readouterr().out
    assert snapshot(verl_copy) == before


def test_a_patch_that_fits_can_be_applied_beside_one_that_does_not(verl_copy):
    foreign_line(verl_copy)
    assert cli("--apply", "--only", "prompt-uids", "--only", "platform-errors", "--target", str(verl_copy)) == 0
    assert states(verl_copy, only=["prompt-uids", "platform-errors"]) == [State.APPLIED] * 2


@pytest.mark.parametrize("failing", [1, 2, 5])
def test_a_write_that_fails_leaves_every_file_as_before(verl_copy, monkeypatch, capsys, failing):
    before = snapshot(verl_copy)
    rename, calls = os.replace, []

    def replace(source, target):
        calls.append(target)
        if len(calls) == failing:
            raise PermissionError(13, "Permission denied", str(target))
        rename(source, target)

    monkeypatch.setattr(os, "replace", replace)
    assert cli("--apply", "--target", str(verl_copy)) == 1
    assert len(calls) == 2 * failing - 1, "as many renames back as there were forth"
    assert "Permission denied" in (error := capsys.readouterr().err) and command.CANNOT_WRITE in error
    assert snapshot(verl_copy) == before, "a temporary file was left or a file changed"


def test_permissions_and_hard_linked_originals_are_kept(verl_copy, tmp_path):
    path = verl_copy / "verl/__init__.py"
    path.chmod(0o640)
    original = path.read_bytes()
    os.link(path, tmp_path / "cache.py")  # as an installer does from its cache
    patching.apply(patching.load_patches(), verl_copy)
    assert path.stat().st_mode & 0o777 == 0o640
    assert path.read_bytes() != original == (tmp_path / "cache.py").read_bytes()


def test_check_is_the_default_and_says_name_state_and_version(verl_copy, capsys):
    patching.apply(patching.load_patches(["prompt-uids"]), verl_copy)
    before = snapshot(verl_copy)
    assert cli("--target", str(verl_copy)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"veRL 0.9.1 in {verl_copy}"
    for line, name in zip(lines[1:], NAMES, strict=True):
        assert line.startswith("applied  " if name == "prompt-uids" else "not applied  ")
        assert name in line and "for veRL 0.9.1" in line
    assert snapshot(verl_copy) == before


def test_bad_arguments_are_named(verl_copy, tmp_path, capsys):
    assert cli("--check", "--target", str(tmp_path)) == 1
    assert f"no veRL in {tmp_path}" in capsys.readouterr().err
    assert cli("--apply", "--only", "no-such", "--target", str(verl_copy)) == 1
    assert "unknown patches no-such; available: " + ", ".join(NAMES) in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli("--apply", "--revert")


def test_the_installed_verl_is_found_without_importing_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "verl", raising=False)
    assert (patching.find_verl() / "verl/__init__.py").is_file()
    assert "verl" not in sys.modules
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(patching.PatchError, match="--target"):
        patching.find_verl()


def test_every_patch_has_a_row_in_the_readme_and_a_test_of_its_behaviour():
    readme = (patching.patch_folder() / "README.md").read_text()
    rows = [line.split("`")[1] for line in readme.splitlines() if line.startswith("| `") and line.count("|") == 4]
    assert sorted(rows) == NAMES
    tests = (Path(__file__).parent / "test_behaviour.py").read_text()
    missing = [name for name in NAMES if f"def test_{name.replace('-', '_')}(" not in tests]
    assert not missing


def test_patches_of_one_file_have_hunks_that_stand_once(released, patched):
    """Then a hunk is found whatever other patches have moved, and no state is ambiguous."""
    for patch in patching.load_patches():
        for file in patch.files:
            for root, side, other in ((released, "old", "new"), (patched, "new", "old")):
                text = (root / file.path).read_text()
                for hunk in file.hunks:
                    assert text.count("".join(getattr(hunk, side))) == 1, (patch.name, hunk)
                    assert text.count("".join(getattr(hunk, other))) == 0, (patch.name, hunk)


def test_the_patch_files_are_found_installed_and_in_the_source_tree(tmp_path, monkeypatch):
    module = tmp_path / "verl_digen" / "patching.py"
    monkeypatch.setattr(patching, "__file__", str(module))
    source, installed = tmp_path / "patches", tmp_path / "verl_digen" / "patches"
    for folder in (source, installed):
        folder.mkdir(parents=True)
    (source / "x.patch").touch()
    with pytest.raises(patching.PatchError, match="no patch files found"):
        patching.patch_folder()  # a folder of this name beside an installed package is not ours
    (tmp_path / "setup.py").touch()
    assert patching.patch_folder() == source
    (installed / "x.patch").touch()
    assert patching.patch_folder() == installed
