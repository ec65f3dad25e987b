"""The one page that lists all that verl_digen registers with veRL.

veRL loads this module through the entry-point group ``verl.plugins`` at the end of ``import verl``, in
every process. It therefore imports neither torch, ray nor verl, and costs milliseconds: each row of
``REGISTRATIONS`` is carried out when veRL itself has imported the module that holds the registry
(``wrapt.register_post_import_hook``).

Invariants
1. A row that fails never breaks veRL: plain text training goes on without it. It is never silent either
   (veRL swallows what an entry point raises): the traceback goes to stderr once per process, the error
   into ``failures``, and ``verl-digen doctor`` shows it.
2. A name which veRL or another plugin has registered is never overwritten; our own is never added twice,
   so that reloading this module or loading the entry point again changes nothing.
3. A target that is itself being imported when its registry appears (``import verl_digen.trainer.trainer``
   before ``import verl``) is registered when its import ends, not from a half-made module.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any


@dataclass(frozen=True)
class Registration:
    """One row: ``target`` ("module:attribute") goes under ``name`` into the registry of ``kind`` in ``hook``."""

    kind: str
    name: str
    hook: str
    target: str

    @property
    def key(self) -> str:
        return f"{self.kind} {self.name!r}"

    @property
    def target_module(self) -> str:
        return self.target.partition(":")[0]

    def load(self) -> Any:
        """Import the target; raises whatever the import raises."""
        module, _, attribute = self.target.partition(":")
        return getattr(importlib.import_module(module), attribute)


# A hook on a package fires after its whole ``__init__``, so targets may import from it freely.
REGISTRATIONS = (
    Registration("trainer", "digen", "verl.trainer.ppo.v1", "verl_digen.trainer.trainer:DigenTrainer"),
    Registration("replica", "diffusers", "verl.workers.rollout.replica", "verl_digen.rollout.replica:DiffusersReplica"),
    Registration(
        "engine", "diffusion_model", "verl.workers.engine", "verl_digen.engine.diffusers_fsdp:DiffusersFSDPEngine"
    ),
    Registration("channel", "digen", "verl.checkpoint_engine", "verl_digen.sync.channel:DigenCheckpointEngine"),
    Registration(
        "reward_manager",
        "diffusion",
        "verl.experimental.reward_loop.reward_manager",
        "verl_digen.rewards.manager:DiffusionRewardManager",
    ),
    Registration(
        "advantage", "digen_group", "verl.trainer.ppo.core_algos", "verl_digen.trainer.algos:digen_group_advantage"
    ),
    Registration("policy_loss", "flow_grpo", "verl.trainer.ppo.core_algos", "verl_digen.trainer.algos:flow_grpo_loss"),
    Registration("platform", "cpu", "verl.plugin.platform.platform_manager", "verl_digen.platform.cpu:PlatformCPU"),
)

ENGINE_BACKENDS = ["fsdp2"]
ENGINE_DEVICES = ["cuda", "npu", "cpu"]


@dataclass(frozen=True)
class Registry:
    """How to look a name up in one of veRL's registries (None if absent), and how to add a row to it."""

    find: Callable[[Any, str], Any]
    add: Callable[[Any, Registration], Any]


def _find_engine(m: Any, model_type: str) -> Any:
    devices = m.EngineRegistry._engines.get(model_type, {}).get(ENGINE_BACKENDS[0], {})
    return next((devices[device] for device in ENGINE_DEVICES if device in devices), None)


def _add_engine(m: Any, row: Registration) -> None:
    m.EngineRegistry.register(model_type=row.name, backend=ENGINE_BACKENDS, device=ENGINE_DEVICES)(row.load())


def _add_replica(m: Any, row: Registration) -> None:
    def load_replica():
        return row.load()

    m.RolloutReplicaRegistry.register(row.name, load_replica)


REGISTRIES = {
    "trainer": Registry(
        find=lambda m, name: m.trainer_base.TRAINER_REGISTRY.get(name),
        add=lambda m, row: m.register_trainer(row.name)(row.load()),
    ),
    "replica": Registry(find=lambda m, name: m.RolloutReplicaRegistry._registry.get(name), add=_add_replica),
    "engine": Registry(find=_find_engine, add=_add_engine),
    "channel": Registry(
        find=lambda m, name: m.CheckpointEngineRegistry._registry.get(name),
        add=lambda m, row: m.CheckpointEngineRegistry.register(row.name)(row.load()),
    ),
    "reward_manager": Registry(
        find=lambda m, name: m.registry.REWARD_MANAGER.get(name),
        add=lambda m, row: m.register(row.name)(row.load()),
    ),
    "advantage": Registry(
        find=lambda m, name: m.ADV_ESTIMATOR_REGISTRY.get(name),
        add=lambda m, row: m.register_adv_est(row.name)(row.load()),
    ),
    "policy_loss": Registry(
        find=lambda m, name: m.POLICY_LOSS_REGISTRY.get(name),
        add=lambda m, row: m.register_policy_loss(row.name)(row.load()),
    ),
    "platform": Registry(
        find=lambda m, name: m.PlatformRegistry.get(name),
        add=lambda m, row: m.PlatformRegistry.register(platform=row.name)(row.load()),
    ),
}
LAZY_KINDS = frozenset({"replica"})  # the registry takes a loader; the target is imported when first asked for

# Kept when this module is reloaded: both belong to the process, not to one execution of this file.
failures: dict[str, BaseException] = globals().get("failures", {})
_hooked: set[tuple] = globals().get("_hooked", set())


def ours(entry: Any) -> bool:
    """Whether what a registry holds comes from this package."""
    return str(getattr(entry, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]


def register(row: Registration) -> None:
    """Carry out one row; its hook module must be imported. Does nothing if it is in place already.

    Raises:
        ValueError: the name belongs to veRL or to another plugin.
        Exception: whatever importing the target or veRL's own ``register`` raises.
    """
    module, registry = sys.modules[row.hook], REGISTRIES[row.kind]
    if row.kind not in LAZY_KINDS:
        row.load()  # first, because on_target_imported registers as soon as the target is complete
    existing = registry.find(module, row.name)
    if existing is None:
        registry.add(module, row)
    elif not ours(existing):
        raise ValueError(
            f"{row.key} is taken in {row.hook} by {getattr(existing, '__module__', '?')}."
            f"{getattr(existing, '__qualname__', existing)}; verl_digen does not overwrite it"
        )


def install(rows: tuple[Registration, ...] = REGISTRATIONS) -> None:
    """Arrange that every row is carried out as soon as veRL has imported its registry; at once if it has."""
    try:
        from wrapt import register_post_import_hook
    except ImportError as error:
        for row in rows:
            _report(row, error)
        return
    for row in rows:
        if astuple(row) in _hooked:
            continue
        _hooked.add(astuple(row))
        watched = row.kind not in LAZY_KINDS and row.target_module not in sys.modules
        if watched:
            register_post_import_hook(_target_hook(row), row.target_module)
        register_post_import_hook(_registry_hook(row, watched), row.hook)


def _registry_hook(row: Registration, watched: bool) -> Callable[[Any], None]:
    def on_registry_imported(module: Any) -> None:
        if not (watched and _importing(row.target_module)):
            _attempt(row)  # else on_target_imported does it

    return on_registry_imported


def _target_hook(row: Registration) -> Callable[[Any], None]:
    def on_target_imported(module: Any) -> None:
        if row.hook in sys.modules and not _importing(row.hook):
            _attempt(row)  # else on_registry_imported does it

    return on_target_imported


def _importing(name: str) -> bool:
    """Whether the module is being imported: in ``sys.modules``, its body not yet run to the end."""
    return bool(getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False))


def _attempt(row: Registration) -> None:
    try:
        register(row)
        failures.pop(row.key, None)
    except Exception as error:  # noqa: BLE001 - invariant 1: shown and recorded, never into veRL's import
        _report(row, error)


def _report(row: Registration, error: BaseException) -> None:
    """Show a failed row on stderr, once per process, and record it in ``failures``."""
    if row.key in failures:
        return
    failures[row.key] = error
    sys.stderr.write(
        f"\n==== verl_digen: {row.key} is NOT available in veRL ({row.target} failed; see `verl-digen doctor`) ====\n"
        f"{''.join(traceback.format_exception(error))}"
        f"==== verl_digen: everything else of veRL works as usual ====\n"
    )
    sys.stderr.flush()


install()
