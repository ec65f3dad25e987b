"""Copies of the veRL files that the patches touch, as released and with every patch, made with git's own tools.

The files come from the installed veRL and are compared with the checksums that the wheel was published with.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from verl_digen.shipped import shipped, verl_config_folder

PATCHES = sorted(shipped("patches").glob("*.patch"))


def touched_paths(patch: Path) -> list[str]:
    """Files that a patch changes, relative to the folder above ``verl/``."""
    return re.findall(r"^\+\+\+ b/(\S+)", patch.read_text(), re.MULTILINE)


def git_apply(root: Path, *arguments: str | Path) -> subprocess.CompletedProcess:
    """``git apply`` in a folder that is in no repository."""
    return subprocess.run(["git", "apply", *arguments], cwd=root, capture_output=True, text=True)


@pytest.fixture(scope="session")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The touched files as released. Read only: tests that write take ``verl_copy``."""
    root = tmp_path_factory.mktemp("released")
    published = {str(file): file.hash for file in importlib.metadata.distribution("verl").files or ()}
    installed = verl_config_folder().parents[2]
    for path in sorted({path for patch in PATCHES for path in touched_paths(patch)}):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(installed / path, root / path)
        digest = hashlib.new(published[path].mode, (root / path).read_bytes()).digest()
        found = base64.urlsafe_b64encode(digest).decode().rstrip("=")
        assert found == published[path].value, f"{path} is not as released: take the patches back first"
    return root


@pytest.fixture(scope="session")
def patched(released: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with every patch applied. Read only."""
    root = tmp_path_factory.mktemp("patched") / "all"
    shutil.copytree(released, root)
    for patch in PATCHES:
        done = git_apply(root, patch)
        assert done.returncode == 0, done.stderr
    return root


@pytest.fixture
def verl_copy(released: Path, tmp_path: Path) -> Path:
    """A copy to write to."""
    root = tmp_path / "site"
    shutil.copytree(released, root)
    return root
