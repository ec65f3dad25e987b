"""A copy of the released veRL files that the patches touch.

The files come from the installed veRL. Should the patches be applied there, they are taken back in the copy;
either way the copy is compared with the checksums that the wheel was published with.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import shutil
from pathlib import Path

import pytest

from verl_digen import patching


def touched_paths() -> list[str]:
    return sorted({file.path for patch in patching.load_patches() for file in patch.files})


def snapshot(root: Path) -> dict[str, bytes]:
    """Every file below ``root`` with its content."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def assert_released(root: Path) -> None:
    published = {str(file): file.hash for file in importlib.metadata.distribution("verl").files or ()}
    for path in touched_paths():
        digest = hashlib.new(published[path].mode, (root / path).read_bytes()).digest()
        assert base64.urlsafe_b64encode(digest).decode().rstrip("=") == published[path].value, f"{path} is not released"


@pytest.fixture(scope="session")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the touched files as released. Read only: tests that write take ``verl_copy``."""
    root = tmp_path_factory.mktemp("released")
    installed = patching.find_verl()
    for path in [*touched_paths(), patching.VERSION_FILE]:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(installed / path, root / path)
    patching.revert(patching.load_patches(), root)
    assert_released(root)
    return root


@pytest.fixture(scope="session")
def patched(released: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with every patch applied. Read only."""
    root = tmp_path_factory.mktemp("patched") / "all"
    shutil.copytree(released, root)
    patching.apply(patching.load_patches(), root)
    return root


@pytest.fixture
def verl_copy(released: Path, tmp_path: Path) -> Path:
    """A copy to write to."""
    root = tmp_path / "site"
    shutil.copytree(released, root)
    return root
