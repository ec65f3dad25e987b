"""Phases of the rollout and of the Trainer on a device that runs behind the host, as accelerators do.

The device is the pretended one of the emulated model, on a clock that passes only in sleeps: a phase that
is read without waiting for the device is short by its last pass, and the next one is long by it.
"""

from __future__ import annotations

import pytest
import torch

from tests.clock import Clock
from tests.engine.harness import STEPS, Options, build_engine, build_sampler, fragment, open_transaction, rule, to_rows
from verl_digen.config.digen import TspConfig
from verl_digen.engine.tilesize import DryRun
from verl_digen.models import emulated
from verl_digen.models.emulated import EmulatedCosts, write_emulated_model
from verl_digen.rollout import sampler as sampler_module
from verl_digen.trainer import worker as worker_module
from verl_digen.trainer.device import DeviceOwner
from verl_digen.trainer.worker import DiffusionActorWorker, TrainFragment

COSTS = EmulatedCosts(denoise_s=1.0, denoise_fixed_s=0.5, decode_s=2.0, train_cell_s=6.0, tile_fixed_s=3.0)
SAMPLES, CELLS = 4, 8


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (emulated, sampler_module, worker_module):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def options(tmp_path):
    return Options(model={"path": str(write_emulated_model(tmp_path / "model", COSTS))})


def test_phases_of_the_rollout(options, clock):
    done = build_sampler(options).run(fragment())
    assert done.phases == pytest.approx(
        {"encode": 0.0, "denoise": STEPS * (0.5 + SAMPLES * 1.0), "decode": SAMPLES * 2.0}
    )


@pytest.mark.parametrize(("cells", "tiles"), [(CELLS, 1), (4, 2)])
def test_phases_of_the_trainer(options, clock, cells, tiles):
    engine = build_engine(options)
    rows = to_rows(build_sampler(options).run(fragment()), fragment().samples)
    worker = DiffusionActorWorker.__new__(DiffusionActorWorker)
    worker.engine, worker.rule, worker.colocated = engine, rule(), False
    worker._commits, worker._train_threads = 0, torch.get_num_threads()
    worker._fetch = lambda samples, _: rows
    worker.device_owner = DeviceOwner(engine, None)
    worker.transaction = open_transaction(engine, rule())
    started = clock.now
    advantages = {(row.uid, row.j): row.advantage for row in rows}
    work = TrainFragment(
        samples=fragment().samples, transitions=2, advantages=advantages, max_cells=cells, rotate=0, last=True
    )
    done = worker.accumulate(work)
    expected = tiles * 3.0 + CELLS * 6.0
    assert done["tiles"] == pytest.approx(expected) and done["ended"] == pytest.approx(started + expected)
    assert [end - start for start, end, _ in done["tile_times"]] == pytest.approx([expected / tiles] * tiles)
    metrics = worker.commit()
    assert metrics["commit_s"] == 0.0 and metrics["grad_norm"] > 0


def test_a_dry_run_measures_whole_tiles(options, clock, monkeypatch):
    monkeypatch.setattr("verl_digen.engine.tilesize.time", clock)
    engine = build_engine(options)
    engine.module.train()
    dry_run = DryRun(
        engine,
        rule(),
        TspConfig(auto=True),
        latent_shape=(4, 8, 8),
        cond=engine.family.encode_prompts(["a prompt"])[0],
        negative=None,
        total=None,
    )
    engine.family.clock.occupy(5.0)  # work of before does not count
    assert dry_run.seconds(2) == pytest.approx(3.0 + 2 * 6.0)
    assert dry_run.find(4) == 4  # 9, 15 and 27 s: 9, 7.5 and 6.75 s a cell
