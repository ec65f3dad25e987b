"""The page of registrations: what veRL knows after importing it, what it keeps of its own, and how failures show.

Importing veRL's registries takes many seconds, so two processes do it once for all tests of this file: one with the
plugin, one with plugins and Hydra's plugin discovery switched off. They print what they found as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from verl_digen import plugin
from verl_digen.cli import doctor
from verl_digen.shipped import shipped

OURS = ["pkg://verl_digen.config", f"file://{shipped('recipes')}"]
PROBE = """
import importlib, json, os, sys

class NoHydraPlugins:
    def find_spec(self, name, path=None, target=None):
        if name == "hydra_plugins":
            raise ImportError("switched off for this run")

with_plugin = os.environ["VERL_USE_EXTERNAL_PLUGINS"] != "none"
if not with_plugin:
    sys.meta_path.insert(0, NoHydraPlugins())

import verl
heavy = [name for name in ("diffusers", "peft", "verl.trainer", "verl.workers") if name in sys.modules]

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
with initialize_config_module("verl.trainer.config", version_base=None):
    paths = [p.path for p in GlobalHydra.instance().config_loader().get_search_path().get_path()]
    composed = OmegaConf.to_container(compose("ppo_trainer"), resolve=False)

def name(entry):
    return f"{entry.__module__}:{entry.__qualname__}"

def names(table):
    return {str(key): name(entry) for key, entry in table.items()}

from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER
from verl.plugin.platform import PlatformRegistry, get_platform
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
from verl.workers.engine import EngineRegistry
from verl.workers.rollout.replica import RolloutReplicaRegistry

registries = {
    "trainer": names(TRAINER_REGISTRY),
    "replica": names(RolloutReplicaRegistry._registry),
    "engine": {
        f"{model} {backend} {device}": name(engine)
        for model, backends in EngineRegistry._engines.items()
        for backend, devices in backends.items()
        for device, engine in devices.items()
    },
    "channel": names(CheckpointEngineRegistry._registry),
    "reward_manager": names(REWARD_MANAGER),
    "advantage": names(ADV_ESTIMATOR_REGISTRY),
    "policy_loss": names(POLICY_LOSS_REGISTRY),
    "platform": names(PlatformRegistry._platforms),
}
found = {
    "heavy": heavy,
    "paths": paths,
    "composed": composed,
    "registries": registries,
    "device": get_platform().device_name,
    "plugin_loaded": "verl_digen.plugin" in sys.modules,
}
if with_plugin:
    from verl_digen import plugin
    from verl_digen.cli import doctor
    found["failures"] = {key: repr(error) for key, error in plugin.failures.items()}
    found["doctor"] = doctor.collect()
print(json.dumps(found))
"""


def probe(plugins: str) -> dict:
    env = {key: value for key, value in os.environ.items() if key != "VERL_PLATFORM"}
    env["VERL_USE_EXTERNAL_PLUGINS"] = plugins
    done = subprocess.run([sys.executable, "-c", PROBE], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) | {"stderr": done.stderr}


@pytest.fixture(scope="module")
def with_plugin() -> dict:
    return probe("auto")


@pytest.fixture(scope="module")
def bare() -> dict:
    return probe("none")


# ------------------------------------------------------------------------------------------- in veRL itself


@pytest.mark.slow
def test_every_row_is_in_veRLs_registries(with_plugin):
    assert with_plugin["plugin_loaded"], "the entry point is not installed"
    assert with_plugin["failures"] == {}, with_plugin["stderr"]
    registries = with_plugin["registries"]
    for row in plugin.REGISTRATIONS:
        if row.kind == "engine":
            for device in plugin.ENGINE_DEVICES:
                assert registries["engine"][f"diffusion_model fsdp2 {device}"] == row.target
        elif row.kind in plugin.LAZY_KINDS:
            assert registries[row.kind][row.name].startswith("verl_digen.plugin:")
        else:
            assert registries[row.kind][row.name] == row.target
    assert "NOT available" not in with_plugin["stderr"]


@pytest.mark.slow
def test_names_of_veRL_are_untouched_and_only_ours_are_new(with_plugin, bare):
    assert not bare["plugin_loaded"]
    for kind, names in bare["registries"].items():
        now = with_plugin["registries"][kind]
        assert {key: now.get(key) for key in names} == names
        new = set(now) - set(names)
        if kind == "engine":
            assert new == {f"diffusion_model fsdp2 {device}" for device in plugin.ENGINE_DEVICES}
        else:
            assert new == {row.name for row in plugin.REGISTRATIONS if row.kind == kind}


@pytest.mark.slow
def test_text_training_composes_the_same_configuration(with_plugin, bare):
    assert with_plugin["composed"] == bare["composed"]
    assert [path for path in with_plugin["paths"] if path not in OURS] == bare["paths"]


@pytest.mark.slow
def test_our_groups_are_on_hydras_search_path_behind_everything_else(with_plugin):
    paths = [path for path in with_plugin["paths"] if path is not None and path.startswith(("pkg://", "file://"))]
    assert paths[-2:] == OURS


@pytest.mark.slow
def test_import_verl_stays_light_and_the_platform_is_chosen_as_before(with_plugin, bare):
    assert with_plugin["heavy"] == bare["heavy"]
    assert with_plugin["device"] == bare["device"] != "cpu"


@pytest.mark.slow
def test_doctor_agrees(with_plugin):
    report = with_plugin["doctor"]
    assert [row["status"] for row in report["registrations"]] == ["ok"] * len(plugin.REGISTRATIONS), report
    assert report["entry_point"] == "ok" and report["ok"] and report["verl_supported"]
    assert report["devices"][0]["device"] == "cpu"


@pytest.mark.slow
def test_main_ppo_help_works():
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "actor_rollout_ref" in done.stdout and "Powered by Hydra" in done.stdout


def test_plugin_page_imports_neither_torch_nor_ray_nor_verl():
    code = "import sys, verl_digen.plugin; print([m for m in ('torch', 'ray', 'verl') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_importing_the_package_installs_the_hooks_before_any_of_its_modules():
    """So that ``import verl_digen.trainer.trainer`` before ``import verl`` can be watched (invariant 3)."""
    code = "import sys, verl_digen; print('verl_digen.plugin' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


# --------------------------------------------------------------------------------- one row at a time, faked


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Throw-away modules on the path, and a kind of registry that is the dict ``names`` of its hook module."""
    monkeypatch.setattr(plugin, "failures", {})
    monkeypatch.setattr(plugin, "_hooked", set())
    monkeypatch.syspath_prepend(tmp_path)
    calls = []

    def add(module, row):
        calls.append(row.name)
        module.names[row.name] = row.load()

    kind = plugin.Registry(find=lambda module, name: module.names.get(name), add=add)
    monkeypatch.setitem(plugin.REGISTRIES, "fake", kind)
    monkeypatch.setattr(plugin, "ours", lambda entry: str(entry.__module__).startswith("digenfake"))
    before = set(sys.modules)

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()

    yield SimpleNamespace(write=write, calls=calls)
    for name in set(sys.modules) - before:
        if name.startswith("digenfake"):
            del sys.modules[name]


def row_of(case: str) -> plugin.Registration:
    return plugin.Registration("fake", "mine", f"digenfake_hook_{case}", f"digenfake_target_{case}:Mine")


def import_hook(row: plugin.Registration):
    return importlib.import_module(row.hook)


def test_a_row_is_carried_out_when_its_registry_is_imported_and_once(fake):
    row = row_of("once")
    fake.write(row.hook, "names = {}")
    fake.write(row.target_module, "class Mine: pass")
    plugin.install((row,))
    plugin.install((row,))  # the entry point loaded twice
    assert row.hook not in sys.modules and row.target_module not in sys.modules
    module = import_hook(row)
    assert module.names["mine"] is sys.modules[row.target_module].Mine
    plugin._hooked.clear()  # as if this module had been executed again
    plugin.install((row,))
    assert fake.calls == ["mine"] and plugin.failures == {}


def test_a_registry_that_is_imported_already_is_served_at_once(fake):
    row = row_of("late")
    fake.write(row.hook, "names = {}")
    fake.write(row.target_module, "class Mine: pass")
    module = import_hook(row)
    plugin.install((row,))
    assert "mine" in module.names and fake.calls == ["mine"]


def test_a_failing_target_is_shown_once_recorded_and_does_not_break_the_import(fake, capsys):
    row = row_of("broken")
    fake.write(row.hook, "names = {'theirs': int}")
    fake.write(row.target_module, "raise RuntimeError('the cause of it')")
    plugin.install((row,))
    assert import_hook(row).names == {"theirs": int}
    plugin._attempt(row)
    err = capsys.readouterr().err
    assert err.count("fake 'mine' is NOT available in veRL") == 1
    assert err.count("RuntimeError: the cause of it") == 1 and "Traceback" in err
    assert isinstance(plugin.failures["fake 'mine'"], RuntimeError)


def test_a_failure_is_forgotten_when_the_row_succeeds_later(fake, capsys):
    row = row_of("recovers")
    fake.write(row.hook, "names = {}")
    plugin.install((row,))
    module = import_hook(row)
    assert list(plugin.failures) == [row.key]
    fake.write(row.target_module, "class Mine: pass")
    importlib.import_module(row.target_module)
    assert "mine" in module.names and plugin.failures == {}


def test_a_name_of_somebody_else_is_not_overwritten(fake, capsys):
    row = row_of("taken")
    fake.write(row.hook, "names = {'mine': int}")
    fake.write(row.target_module, "class Mine: pass")
    plugin.install((row,))
    assert import_hook(row).names == {"mine": int}
    assert "is taken in digenfake_hook_taken by builtins.int" in str(plugin.failures[row.key])
    assert "does not overwrite" in capsys.readouterr().err


def test_a_target_imported_before_veRL_is_registered_when_it_is_complete(fake):
    row = row_of("first")
    fake.write(row.hook, "names = {}")
    fake.write(row.target_module, f"from {row.hook} import names\nEARLY = dict(names)\nclass Mine: pass")
    plugin.install((row,))
    target = importlib.import_module(row.target_module)
    assert target.EARLY == {}
    assert target.names == {"mine": target.Mine} and plugin.failures == {}


def test_a_half_imported_target_that_cannot_be_watched_is_a_visible_failure(fake, capsys):
    row = row_of("half")
    fake.write(row.hook, "names = {}")
    fake.write(row.target_module, f"INSTALL()\nfrom {row.hook} import names\nclass Mine: pass")
    spec = importlib.util.find_spec(row.target_module)
    module = importlib.util.module_from_spec(spec)
    module.INSTALL = lambda: plugin.install((row,))
    sys.modules[row.target_module] = module
    spec._initializing = True
    spec.loader.exec_module(module)
    assert row.key in plugin.failures and "NOT available" in capsys.readouterr().err


def test_without_wrapt_every_row_is_a_visible_failure(fake, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wrapt", None)
    plugin.install((row_of("nowrapt"),))
    assert isinstance(plugin.failures["fake 'mine'"], ImportError)
    assert "NOT available" in capsys.readouterr().err


def test_reloading_the_page_keeps_what_it_recorded_and_hooks_nothing_twice():
    failures, hooked = plugin.failures, set(plugin._hooked)
    assert importlib.reload(plugin).failures is failures
    assert set(plugin._hooked) == hooked


# ------------------------------------------------------------------------------------------------- doctor


def failed_report() -> doctor.Report:
    return {
        "ok": False,
        "versions": {"python": "3.11", "verl": "0.8.0", "peft": None, "vllm": None},
        "verl_supported": False,
        "devices": [{"device": "cpu", "name": "a processor", "memory_gib": 8.0, "cores": 2}],
        "platform": {"VERL_PLATFORM": None, "device": "cpu"},
        "entry_point": "ok",
        "registrations": [
            {"kind": "trainer", "name": "digen", "target": "a:B", "status": "failed", "cause": "KeyError: 'x[y]'"}
        ],
        "extras": [{"extra": "ocr", "missing": ["rapidocr"], "command": "pip install 'verl-digen[ocr]'"}],
        "assets": {"path": "p", "files": 0, "bytes": 0, "present": False, "command": "verl-digen prepare"},
    }


def test_doctor_shows_causes_and_commands_and_fails(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "collect", failed_report)
    monkeypatch.setenv("COLUMNS", "200")
    assert doctor.run(SimpleNamespace(json=False)) == 1
    out = capsys.readouterr().out
    for text in ("KeyError: 'x[y]'", "pip install 'verl-digen[ocr]'", "not supported", "verl-digen prepare", "0 of 1"):
        assert text in out
    assert doctor.run(SimpleNamespace(json=True)) == 1
    assert json.loads(capsys.readouterr().out) == failed_report()


def test_doctor_explains_an_excluded_entry_point(monkeypatch):
    entry = SimpleNamespace(name="verl_digen")
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: [entry])
    for policy, verdict in (("auto", "ok"), ("other,verl_digen", "ok"), ("none", "excluded"), ("other", "excluded")):
        monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", policy)
        assert doctor.check_entry_point().startswith(verdict)
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: [])
    assert "pip install ." in doctor.check_entry_point()


def test_doctor_reports_missing_extras_with_their_command():
    extras = {row["extra"]: row for row in doctor.missing_extras()}
    assert {"vllm", "flash-attn", "ocr", "test", "docs"} <= set(extras)
    for row in extras.values():
        assert (row["command"] is None) == (not row["missing"])
    if doctor.version_of("vllm-omni") is None:
        assert "vllm-omni==0.24.0" in extras["vllm"]["missing"]
        assert extras["vllm"]["command"] == "pip install 'verl-digen[vllm]'"
