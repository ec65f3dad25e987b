"""Phases of the rollout and of the Trainer on a device that runs behind the host, as accelerators do.

The device is the pretended one of the emulated model, on a clock that passes only in sleeps: a phase that
is read without waiting for the device is short by its last pass, and the next one is long by it.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.clock import Clock
from tests.engine.harness import STEPS, Options, build_engine, build_sampler, fragment, open_transaction, rule, to_rows
from verl_digen.engine.tilesize import TileSize
from verl_digen.models import emulated
from verl_digen.models.emulated import EmulatedCosts, write_emulated_model
from verl_digen.rollout import sampler as sampler_module
from verl_digen.trainer import worker as worker_module
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
    size = TileSize(max_cells=cells, auto=False, memory_fraction=0.9, device=torch.device("cpu"))
    worker = DiffusionActorWorker.__new__(DiffusionActorWorker)
    worker.engine, worker.rule, worker.tile_size, worker.colocated = engine, rule(), size, False
    worker._paused, worker._commits, worker._train_threads = False, 0, torch.get_num_threads()
    worker._fetch = lambda samples, _: rows
    worker._mode = SimpleNamespace(__exit__=lambda *_: None)
    worker.transaction = open_transaction(engine, rule(), size)
    started = clock.now
    advantages = {(row.uid, row.j): row.advantage for row in rows}
    work = TrainFragment(
        samples=fragment().samples, transitions=2, advantages=advantages, rotate=0, last=True, partition="train"
    )
    done = worker.accumulate(work)
    expected = tiles * 3.0 + CELLS * 6.0
    assert done["tiles"] == pytest.approx(expected) and done["ended"] == pytest.approx(started + expected)
    assert [end - start for start, end, _ in done["tile_times"]] == pytest.approx([expected / tiles] * tiles)
    metrics = worker.commit()
    assert metrics["commit_s"] == 0.0 and metrics["grad_norm"] > 0


def test_the_search_for_a_tile_size_measures_whole_tiles(clock, monkeypatch):
    monkeypatch.setattr("verl_digen.engine.tilesize.time", clock)
    device = emulated.PretendedDevice()
    size = TileSize(
        max_cells=None,
        auto=True,
        memory_fraction=0.9,
        device=torch.device("cpu"),
        agree=lambda values, _: list(values),
        synchronize=device.wait,
    )
    device.occupy(5.0)  # work of before does not count
    size.measure(1, lambda: device.occupy(2.0))
    assert size._seconds == 2.0
