"""One Ray cluster, one TransferQueue and one digits folder for the whole test session."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("VERL_PLATFORM", "cpu")

import pytest

from tests.e2e.harness import SETS, SMALL, Run, compose


@pytest.fixture(scope="session")
def digits_dir(tmp_path_factory) -> Path:
    """Model and prompts as ``verl-digen prepare digits`` writes them."""
    from verl_digen.cli.main import main

    folder = tmp_path_factory.mktemp("digits")
    assert main(["prepare", "digits", "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="session")
def nodes(digits_dir):
    """A Ray cluster of one node that declares 16 GPUs; tests may add nodes to it."""
    import ray
    from ray.cluster_utils import Cluster

    head = {
        "num_cpus": 32,
        "num_gpus": 16,
        "include_dashboard": False,
        # every process costs seconds of a core: start none ahead of its use
        "_system_config": {"prestart_worker_first_driver": False, "enable_worker_prestart": False},
    }
    nodes = Cluster(initialize_head=True, head_node_args=head)
    ray.init(
        address=nodes.address,
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
    yield nodes
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture(scope="session")
def cluster(nodes, digits_dir):
    """The cluster with a TransferQueue on its first node."""
    import transfer_queue as tq

    config = compose(digits_dir, Path("unused"), [])
    tq.init(config.transfer_queue)
    yield nodes
    tq.close()


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


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Note on a test that it failed."""
    report = (yield).get_result()
    item.failed = getattr(item, "failed", False) or report.failed


@pytest.fixture(scope="session")
def sets(cluster, digits_dir, tmp_path_factory):
    """Running sets of processes by name (see ``harness.SETS``); ended with the session."""
    start, _ = _launcher(digits_dir, tmp_path_factory.mktemp("sets"))
    running: dict[str, Run] = {}
    yield running, start
    for run in running.values():
        run.close()


def _shared(name: str):
    @pytest.fixture(name=name)
    def shared(sets, request):
        running, start = sets
        if name not in running:
            running[name] = start(*SETS[name], name=name)
        yield running[name]
        if request.node.failed:  # it may be in any state: the next test gets a new one
            running.pop(name).close()

    shared.__doc__ = f"The set of processes ``{name}``; call ``again`` before use."
    return shared


one, pools = _shared("one"), _shared("pools")
