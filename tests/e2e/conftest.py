"""One Ray cluster, one TransferQueue and one digits folder for the whole test session."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("VERL_PLATFORM", "cpu")

import pytest

from tests.e2e.harness import SMALL, Run, compose


@pytest.fixture(scope="session")
def digits_dir(tmp_path_factory) -> Path:
    """Model and prompts as ``verl-digen prepare digits`` writes them."""
    from verl_digen.cli.main import main

    folder = tmp_path_factory.mktemp("digits")
    assert main(["prepare", "digits", "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="session")
def cluster(digits_dir):
    """A local Ray cluster that declares 8 GPUs, and a TransferQueue on it."""
    import ray
    import transfer_queue as tq

    ray.init(
        num_cpus=16,
        num_gpus=8,
        # every process costs seconds of a core: start none ahead of its use
        _system_config={"prestart_worker_first_driver": False, "enable_worker_prestart": False},
        include_dashboard=False,
        log_to_driver=bool(os.environ.get("E2E_LOGS")),
        runtime_env={
            "env_vars": {
                "VERL_PLATFORM": "cpu",
                "TRANSFER_QUEUE_ENABLE": "1",
                "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
                "PYTHONPATH": os.pathsep.join(
                    [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
                ),
            }
        },
    )
    config = compose(digits_dir, Path("unused"), [])
    tq.init(config.transfer_queue)
    yield
    tq.close()
    ray.shutdown()


def _launcher(digits_dir: Path, folder: Path):
    runs: list[Run] = []

    def start(*overrides: str, name: str | None = None, steps: int = 3) -> Run:
        options = [*SMALL, f"trainer.total_training_steps={steps}", *overrides]
        runs.append(Run(digits_dir, folder / (name or f"run{len(runs)}"), options))
        return runs[-1].start()

    return start, runs


@pytest.fixture
def launch(cluster, digits_dir, tmp_path):
    """``launch(*overrides)`` starts a small run; all runs of a test are torn down after it."""
    start, runs = _launcher(digits_dir, tmp_path)
    yield start
    for run in runs:
        run.close()


@pytest.fixture(scope="module")
def processes(cluster, digits_dir, tmp_path_factory):
    """``processes(name, *overrides)``: the running set of that name, started if it is not the one at hand.

    One set is kept at a time. ``processes(None)`` ends it; call it when a test has left the set in an unknown state.
    """
    start, _ = _launcher(digits_dir, tmp_path_factory.mktemp("processes"))
    at_hand: dict[str, Run] = {}

    def get(name: str | None, *overrides: str, **options) -> Run | None:
        for other in [other for other in at_hand if other != name]:
            at_hand.pop(other).close()
        if name is not None and name not in at_hand:
            at_hand[name] = start(*overrides, name="".join(c if c.isalnum() else "_" for c in name), **options)
        return at_hand.get(name)

    yield get
    get(None)
