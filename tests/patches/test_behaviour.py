"""What each patch changes: the released code has the gap that the patch names, the patched code has not.

Functions are taken out of the files and run by themselves, because importing veRL takes many seconds; one
test at the end starts a process with the patched package.
"""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest

from tests.patches.conftest import PATCHES, git_apply
from verl_digen.shipped import verl_config_folder


def take(root: Path, path: str, names: list[str], scope: dict[str, Any], cls: str | None = None) -> SimpleNamespace:
    """Run the definitions ``names`` of a file (of its class ``cls``), and no more of it, in ``scope``."""
    body = ast.parse((root / path).read_text()).body
    if cls is not None:
        (body,) = (node.body for node in body if isinstance(node, ast.ClassDef) and node.name == cls)
    chosen = [node for node in body if getattr(node, "name", None) in names]
    module = ast.Module([ast.parse("from __future__ import annotations").body[0], *chosen], [])
    for node in chosen:
        node.decorator_list = [d for d in node.decorator_list if getattr(d, "id", None) in scope]
    exec(compile(module, path, "exec"), scope)
    return SimpleNamespace(**{name: scope[name] for name in names if name in scope})


def test_policy_loss_name(released, patched):
    def register_two(root: Path) -> dict[str, Callable]:
        registry: dict[str, Callable] = {}
        scope = {"POLICY_LOSS_REGISTRY": registry}
        register = take(root, "verl/trainer/ppo/core_algos.py", ["register_policy_loss"], scope).register_policy_loss
        register("same")(abs)
        register("same")(abs)
        assert registry == {"same": abs}
        register("same")(max)
        return registry

    assert register_two(released) == {"same": max}, "released: the second overwrites"
    with pytest.raises(ValueError, match="same has already been registered: .*abs.*max"):
        register_two(patched)


BASE = "verl/single_controller/ray/base.py"


def pool_manager(root: Path, resources: dict[str, float], resource_name: str = "GPU") -> type:
    state = SimpleNamespace(available_resources_per_node=lambda: {"node": resources})
    scope = {
        "dataclass": dataclass,
        "field": field,
        "ray": SimpleNamespace(_private=SimpleNamespace(state=state), cluster_resources=lambda: resources),
        "RayResourcePool": Mock(side_effect=lambda **kwargs: SimpleNamespace(**{"accelerator_type": None, **kwargs})),
        "get_platform": lambda: SimpleNamespace(ray_resource_name=lambda: resource_name),
    }
    return take(root, BASE, ["ResourcePoolManager"], scope).ResourcePoolManager


def test_pool_accelerator_type(released, patched):
    resources = {"GPU": 4, "CPU": 8, "accelerator_type:H100": 1, "GPU_group_0_ab": 1}
    spec = {"trainer": [1], "generator": [2]}
    with pytest.raises(TypeError, match="accelerator_types"):
        pool_manager(released, resources)(spec, {}, accelerator_types={"trainer": "accelerator_type:H100"})

    cls = pool_manager(patched, resources)
    manager = cls(spec, {}, accelerator_types={"trainer": "accelerator_type:H100"})
    manager.create_resource_pool()
    types = {name: pool.accelerator_type for name, pool in manager.resource_pool_dict.items()}
    assert types == {"trainer": "accelerator_type:H100", "generator": None}

    plain = cls(spec, {})
    plain.create_resource_pool()
    assert {pool.accelerator_type for pool in plain.resource_pool_dict.values()} == {None}

    with pytest.raises(ValueError, match=r"unknown resource pools \['trainr'\].*\['generator', 'trainer'\]"):
        cls(spec, {}, accelerator_types={"trainr": "accelerator_type:H100"}).create_resource_pool()
    with pytest.raises(
        ValueError, match=r"pool trainer asks for accelerator type A100.*\['CPU', 'GPU', 'accelerator_type:H100'\]"
    ):
        cls(spec, {}, accelerator_types={"trainer": "A100"}).create_resource_pool()


def test_pool_resource_name(released, patched):
    spec = {"trainer": [2]}
    with pytest.raises(ValueError, match="available GPUs 0"):
        pool_manager(released, {"MLU": 2}, "MLU")(spec, {}).create_resource_pool()
    pool_manager(patched, {"MLU": 2}, "MLU")(spec, {}).create_resource_pool()
    for name in ("GPU", "NPU"):
        pool_manager(patched, {name: 2}, name)(spec, {}).create_resource_pool()
        with pytest.raises(ValueError, match=f"Total available {name}s 1 is less than total desired {name}s 2"):
            pool_manager(patched, {name: 1}, name)(spec, {}).create_resource_pool()


def test_rollout_registry(released, patched):
    path = "verl/workers/rollout/base.py"
    scope = {"_ROLLOUT_REGISTRY": {("vllm", "async"): "verl.A"}, "importlib": importlib}
    assert not hasattr(take(released, path, ["register_rollout_class"], {}), "register_rollout_class")
    functions = take(patched, path, ["register_rollout_class", "get_rollout_class"], scope)
    for _ in range(2):
        functions.register_rollout_class("digen", "fractions.Fraction")
    assert functions.get_rollout_class("digen").__name__ == "Fraction"
    with pytest.raises(ValueError, match="vllm with mode async is already registered: verl.A vs other.B"):
        functions.register_rollout_class("vllm", "other.B")
    functions.register_rollout_class("vllm", "other.B", mode="other")
    assert scope["_ROLLOUT_REGISTRY"][("vllm", "async")] == "verl.A"


def test_prompt_uids(released, patched):
    def fetch(root: Path, *classes: type) -> list[str]:
        scope = {"np": np, "uuid": uuid, "tu": SimpleNamespace(get_tensordict=dict)}
        names = ["_make_uids", "_fetch_one_gen_batch"]
        base = type("Base", (), vars(take(root, "verl/trainer/ppo/v1/trainer_base.py", names, scope, cls="PPOTrainer")))
        trainer = type("Trainer", (*classes, base), {})()
        trainer.train_dataloader, trainer.train_dataloader_it = [{"raw_prompt": ["a", "b", "c"]}], None
        uids = trainer._fetch_one_gen_batch()["uid"]
        assert uids.dtype == object and len(set(uids)) == 3 and not any("_" in uid for uid in uids)
        return list(uids)

    class Derived:
        def _make_uids(self, batch_dict, partition_id):
            return np.array([f"{partition_id}-{prompt}" for prompt in batch_dict["raw_prompt"]], dtype=object)

    expected = ["train-a", "train-b", "train-c"]
    assert fetch(patched, Derived) == expected
    assert fetch(released, Derived) != expected, "released: the ids cannot be derived"
    assert fetch(patched) != fetch(patched), "random unless overridden, as released"
    source = (patched / "verl/trainer/ppo/v1/trainer_base.py").read_text()
    assert source.count("uuid.uuid4()") == 1 and 'self._make_uids(batch_dict, partition_id="val")' in source


INTERRUPTIONS = [
    "abort_replicas",
    "release_kv_cache_replicas",
    "resume_kv_cache_replicas",
    "resume_generation_replicas",
]


def sync(root: Path, engine: type) -> list[str]:
    """The calls that one weight update makes, in their order."""
    path = "verl/checkpoint_engine/base.py"
    scope = {
        "ray": Mock(get=lambda refs: []),
        "RayWorkerGroup": Mock(),
        "RayClassWithInitArgs": Mock(),
        "_worker_cls": None,
    }
    update = take(root, path, ["update_weights"], scope, cls="CheckpointEngineManager").update_weights
    manager = Mock(backend="gloo", backend_cls=engine, replicas=[])
    manager.actor_wg.world_size = 1
    for name in INTERRUPTIONS:
        manager.attach_mock(AsyncMock(), name)
    manager.actor_wg.execute_checkpoint_engine.return_value = []
    scope["RayWorkerGroup"].return_value.world_size = 1
    scope["RayWorkerGroup"].return_value.execute_checkpoint_engine.return_value = []
    manager.actor_wg.update_weights.return_value = []
    scope["RayWorkerGroup"].return_value.update_weights.return_value = []
    assert asyncio.run(update(manager, global_steps=3)) == {}
    wanted = [*INTERRUPTIONS, "build_process_group", "actor_wg.update_weights"]
    return [call[0] for call in manager.mock_calls if call[0] in wanted]


def test_weight_sync_without_abort(released, patched):
    def engine(root: Path, **attributes) -> type:
        (cls,) = (
            node
            for node in ast.parse((root / "verl/checkpoint_engine/base.py").read_text()).body
            if isinstance(node, ast.ClassDef) and node.name == "CheckpointEngine"
        )
        defaults = {
            node.target.id: ast.literal_eval(node.value) for node in cls.body if isinstance(node, ast.AnnAssign)
        }
        return type("Engine", (), {**defaults, **attributes})

    before = ["abort_replicas", "release_kv_cache_replicas", "build_process_group", "actor_wg.update_weights"]
    interrupted = [*before, "resume_kv_cache_replicas", "resume_generation_replicas"]
    assert sync(released, engine(released, interrupts_generation=False)) == interrupted
    assert sync(patched, engine(patched)) == interrupted, "the default is as released"
    running = ["build_process_group", "actor_wg.update_weights"]
    assert sync(patched, engine(patched, interrupts_generation=False)) == running


def test_reward_tokenizer_optional(released, patched):
    def load(root: Path, **model) -> list[str]:
        loaded: list[str] = []
        scope = {
            "copy_to_local": lambda path: path,
            "hf_tokenizer": lambda path, **kwargs: loaded.append(path),
            "load_reward_manager": Mock(),
        }
        path = "verl/experimental/reward_loop/reward_loop.py"
        init = take(root, path, ["_init_reward_fn"], scope, cls="RewardLoopWorker")._init_reward_fn
        model_config = Mock(path="model", tokenizer_path=None)
        model_config.get = lambda key, default: model.get(key, default)
        config = SimpleNamespace(
            actor_rollout_ref=SimpleNamespace(model=model_config),
            reward=SimpleNamespace(reward_model=SimpleNamespace(enable=False)),
        )
        init(SimpleNamespace(config=config, reward_router_address=None))
        return loaded

    assert load(released, load_tokenizer=False) == ["model"]
    assert load(patched, load_tokenizer=False) == []
    assert load(patched) == load(patched, load_tokenizer=True) == ["model"]


def platform_package(root: Path, name: str, whole: Path):
    """Import verl/plugin/platform of ``root`` under another name; its other files come from ``whole``."""
    folder = root / "verl/plugin/platform"
    for file in whole.glob("*.py"):
        if not (folder / file.name).exists():
            shutil.copy(file, folder / file.name)
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    package = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    return package


def test_platform_errors(verl_copy, tmp_path, caplog, monkeypatch):
    whole = verl_config_folder().parents[2] / "verl/plugin/platform"
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    shutil.copytree(verl_copy, tmp_path / "patched")
    (patch,) = (patch for patch in PATCHES if patch.stem == "platform-errors")
    assert git_apply(tmp_path / "patched", patch).returncode == 0
    names = {"released": verl_copy, "patched": tmp_path / "patched"}
    packages = {name: platform_package(root, f"platform_{name}", whole) for name, root in names.items()}

    def incomplete(package) -> type:
        return package.PlatformRegistry.register("half")(type("Half", (package.PlatformBase,), {}))

    assert incomplete(packages["released"]) is packages["released"].PlatformRegistry.get("half")
    with pytest.raises(TypeError, match=r"'half' \(Half\) does not implement \['communication_backend_name', 'cudart'"):
        incomplete(packages["patched"])
    assert packages["patched"].PlatformRegistry.registered_names() == ("nvidia", "huawei", "amd")

    for name, package in packages.items():
        manager = sys.modules[f"{package.__name__}.platform_manager"]
        registry = package.PlatformRegistry._platforms
        registry.clear()
        members = dict.fromkeys(package.PlatformBase.__abstractmethods__)
        members["is_platform_available"] = Mock(side_effect=OSError("driver not found"))
        package.PlatformRegistry.register("broken")(type("Broken", (package.PlatformBase,), members))
        caplog.clear()
        assert manager._detect_platform_name() == "nvidia"
        shown = [record for record in caplog.records if record.levelname == "WARNING" and "broken" in record.message]
        assert any("driver not found" in (record.exc_text or "") for record in shown) == (name == "patched")


@pytest.mark.slow
def test_plugin_load_errors(tmp_path):
    """A process that imports the patched veRL prints the error of a plugin that raises, and goes on."""
    installed = verl_config_folder().parents[2]
    shutil.copytree(installed / "verl", tmp_path / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    for patch in PATCHES:
        assert git_apply(tmp_path, patch).returncode == 0
    (tmp_path / "bad_plugin.py").write_text("raise RuntimeError('no such dependency')\n")
    info = tmp_path / "bad_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[verl.plugins]\nbad = bad_plugin\n")
    process = subprocess.run(
        [sys.executable, "-c", "import verl; print(verl.__file__)"],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "VERL_USE_EXTERNAL_PLUGINS": "bad"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == str(tmp_path / "verl/__init__.py"), "another veRL was imported"
    assert "Failed to load plugin 'bad' (bad_plugin)" in process.stderr
    assert "RuntimeError: no such dependency" in process.stderr
