"""What ``pip install .`` installs: the wheel's content and metadata, Hydra's plugin, the pinned CPU set-up, scripts."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import verl_digen

ROOT = Path(__file__).parents[1]
SOURCES = ("setup.py", "pyproject.toml", "LICENSE", "verl_digen", "patches", "recipes")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy of the tree so that no build folder is left in it."""
    copy = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", out, copy]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def about(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_string(archive.read(path).decode())


def pins(*names: str) -> dict[str, Requirement]:
    lines = [line for name in names for line in (ROOT / f"requirements-{name}.txt").read_text().splitlines()]
    found = [Requirement(line) for line in lines if line.strip() and not line.startswith(("#", "-r "))]
    return {canonical(requirement.name): requirement for requirement in found}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_module_and_data_file_is_in_the_wheel(names):
    expected = set()
    for path in (ROOT / "verl_digen").rglob("*"):
        relative = path.relative_to(ROOT)
        if path.suffix in {".py", ".yaml", ".json", ".safetensors", ".npz"} and "__pycache__" not in path.parts:
            expected.add(relative.as_posix().replace("verl_digen/hydra_plugins/", "hydra_plugins/"))
    expected |= {f"verl_digen/patches/{path.name}" for path in (ROOT / "patches").glob("*.patch")}
    expected |= {f"verl_digen/{path.relative_to(ROOT)}" for path in (ROOT / "recipes").rglob("*.yaml")}
    assert len(expected) > 40
    assert expected <= names, sorted(expected - names)


def test_nothing_else_is_in_the_wheel(names):
    tops = {name.split("/")[0] for name in names}
    assert tops == {"verl_digen", "hydra_plugins", f"verl_digen-{verl_digen.__version__}.dist-info"}
    assert not [name for name in names if name.startswith("verl_digen/hydra_plugins/")]  # only where Hydra looks
    assert not [name for name in names if name == "hydra_plugins/__init__.py"]  # a namespace shared with others


def test_metadata(about, wheel):
    assert about["Name"] == "verl-digen" and about["Version"] == verl_digen.__version__
    assert SpecifierSet(about["Requires-Python"]) == SpecifierSet(">=3.10,<3.13")
    assert "Apache-2.0" in (about["License-Expression"] or about["License"])
    requires = [Requirement(text) for text in about.get_all("Requires-Dist")]
    extra = {str(r).partition(";")[0].strip() for r in requires if r.marker and r.marker.evaluate({"extra": "vllm"})}
    assert {"vllm==0.24.0", "vllm-omni==0.24.0", "diffusers==0.38.0"} <= extra
    assert {"vllm", "flash-attn", "ocr", "test", "docs"} <= set(about.get_all("Provides-Extra"))
    assert "verl==0.9.1" in {str(r) for r in requires}
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        entry_points = archive.read(path).decode()
    assert "[verl.plugins]\nverl_digen = verl_digen.plugin" in entry_points
    assert "verl-digen = verl_digen.cli.main:main" in entry_points


def test_hydra_finds_our_plugin_in_an_installed_wheel_beside_another_one(wheel, tmp_path):
    site, other = tmp_path / "site", tmp_path / "other"
    with zipfile.ZipFile(wheel) as archive:  # a wheel of pure Python is installed by unpacking it
        archive.extractall(site)
    (other / "hydra_plugins").mkdir(parents=True)
    (other / "hydra_plugins" / "somebody.py").write_text("LOADED = True\n")
    code = (
        "from hydra import compose, initialize_config_module\n"
        "from hydra.core.global_hydra import GlobalHydra\n"
        "import sys, hydra_plugins.verl_digen_searchpath as ours\n"
        "with initialize_config_module('verl_digen.config', version_base=None):\n"
        "    paths = GlobalHydra.instance().config_loader().get_search_path().get_path()\n"
        "print(ours.__file__)\n"
        "print([p.path for p in paths if p.provider == 'verl_digen'])\n"
        "print(sys.modules['hydra_plugins.somebody'].LOADED)\n"
    )
    env = {"PYTHONPATH": f"{site}:{other}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    file, paths, somebody = done.stdout.splitlines()
    assert file.startswith(str(site))
    assert paths == f"['pkg://verl_digen.config', 'file://{site}/verl_digen/recipes']" and somebody == "True"


def test_pins_are_exact_portable_and_satisfy_the_package(about):
    for requirement in pins("cpu", "test").values():
        (specifier,) = requirement.specifier
        assert specifier.operator == "==" and requirement.url is None, requirement
        assert Version(specifier.version).local is None, f"{requirement}: a local version exists on one index only"
    text = (ROOT / "requirements-cpu.txt").read_text() + (ROOT / "requirements-test.txt").read_text()
    assert "://" not in text and "--" not in text and "torchvision" not in text
    for wanted in map(Requirement, about.get_all("Requires-Dist")):
        if wanted.marker is None:
            pin = pins("cpu").get(canonical(wanted.name))
            assert pin is not None, f"{wanted.name} is required but not pinned"
            (specifier,) = pin.specifier
            assert wanted.specifier.contains(specifier.version), f"{pin} does not satisfy {wanted}"
    assert next(iter(pins("cpu"))) == "torch"


def test_requirements_of_the_test_extra_are_pinned(about):
    wanted = [r for r in map(Requirement, about.get_all("Requires-Dist")) if r.marker]
    for requirement in (r for r in wanted if r.marker.evaluate({"extra": "test"})):
        assert canonical(requirement.name) in pins("cpu", "test"), requirement


@pytest.mark.parametrize("script", [".ci/run", "tests/run.sh"])
def test_scripts_are_executable_and_parse(script):
    path = ROOT / script
    assert path.stat().st_mode & 0o111
    assert path.read_text().startswith("#!/usr/bin/env bash\n") and "set -euo pipefail" in path.read_text()
    assert subprocess.run(["bash", "-n", path]).returncode == 0
