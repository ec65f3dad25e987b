"""The tile benchmark on a CPU with tiny networks: all families and kinds of rows, and options that are refused.

Guards that rollout and training tiles of any shape give the same log-probs (each cell at its own sigma), and that the
benchmark would show it if they did not. What is not covered: CUDA, flash attention, and the figures themselves.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "recipes" / "benchmarks" / "gpu_tiles.py"
MODELS = ("flux", "wan", "qwen")
TINY = ["--device", "cpu", "--tiny", "--dtype", "float32", "--warmup", "0", "--repeats", "1"]
SMALL = ["--max-cells", "4", "--max-batch", "2", "--rollout-batch", "2", "--transitions", "2"]
TILES = [(1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1)]
KEYS = {
    "model",
    "kind",
    "samples",
    "transitions",
    "cells",
    "ms",
    "ms_per_cell",
    "speedup_per_cell",
    "peak_gib",
    "lp_diff_mean",
    "lp_diff_max",
    "device",
    "dtype",
    "attention",
    "source",
}


@pytest.fixture(scope="module")
def script():
    """The benchmark as a module."""
    spec = importlib.util.spec_from_file_location("gpu_tiles", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def rows_of(script, folder: Path, *options: str) -> list[dict]:
    script.main([*TINY, *SMALL, "--json", str(folder / "rows.json"), *options])
    return json.loads((folder / "rows.json").read_text(encoding="utf-8"))


def test_every_model_has_every_kind_of_row_in_a_process_without_ray_and_verl(tmp_path):
    code = (
        "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__'); "
        "print('loaded:', *({'ray', 'verl'} & set(sys.modules)))"
    )
    options = [*TINY, *SMALL, "--json", str(tmp_path / "rows.json")]
    done = subprocess.run(
        [sys.executable, "-c", code, str(SCRIPT), *options], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].strip() == "loaded:"
    assert f"torch {torch.__version__}" in done.stdout
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))

    for model in MODELS:
        mine = {
            kind: [r for r in rows if (r["model"], r["kind"]) == (model, kind)]
            for kind in ("agreement", "sample", "train")
        }
        shapes = {kind: [(r["samples"], r["transitions"]) for r in some] for kind, some in mine.items()}
        assert shapes == {
            "agreement": [t for t in TILES if max(t) <= 2],
            "sample": [(1, 1), (2, 1)],
            "train": TILES,
        }
        for row in mine["agreement"]:
            assert 0 <= row["lp_diff_mean"] <= row["lp_diff_max"] < 1e-3
            assert row["ratio_dev_max"] == pytest.approx(row["lp_diff_max"], rel=1e-2)
        for row in mine["sample"] + mine["train"]:
            assert row["ms_per_cell"] == pytest.approx(row["ms"] / row["cells"])
            first = mine[row["kind"]][0]
            assert row["speedup_per_cell"] == pytest.approx(first["ms"] / row["ms_per_cell"])
    for row in rows:
        assert row.keys() >= KEYS
        assert row["cells"] == row["samples"] * row["transitions"]
        assert (row["status"], row["source"], row["device"], row["dtype"]) == ("ok", "measured", "cpu", "float32")
        assert row["attention"] == "native"


@pytest.mark.parametrize("model", MODELS)
def test_one_sigma_for_a_whole_tile_would_show_in_the_agreement(script, tmp_path, monkeypatch, model):
    right = script.Network.predict
    monkeypatch.setattr(
        script.Network, "predict", lambda self, x, sigma, cond: right(self, x, sigma[:1].expand_as(sigma), cond)
    )
    rows = rows_of(script, tmp_path, "--models", model, "--max-batch", "1")
    worst = {(r["samples"], r["transitions"]): r["lp_diff_max"] for r in rows if r["kind"] == "agreement"}
    assert worst[2, 1] < 1e-3  # cells of one transition do share their sigma
    assert min(worst[1, 2], worst[2, 2]) > 1e-3


@pytest.mark.parametrize("model", MODELS)
def test_gradient_of_a_tile_is_the_sum_over_its_cells(script, model):
    options = script.parse_options([*TINY, "--steps", "3", "--transitions", "2"])
    network = script.build(model, options)
    tile = script.synthetic_cells(network, 2, 2, options)

    def gradient(pieces: list[script.Cells]) -> dict[str, torch.Tensor]:
        network.transformer.zero_grad(set_to_none=True)
        for piece in pieces:
            script.train_tile(network, piece, planned_cells=4)
        return {name: p.grad for name, p in network.transformer.named_parameters() if p.grad is not None}

    def cell(c: int) -> script.Cells:
        parts = {name: getattr(tile, name)[c : c + 1] for name in ("x", "x_next", "sigma", "sigma_next", "advantage")}
        return script.Cells(**parts, cond={name: value[c : c + 1] for name, value in tile.cond.items()})

    whole, summed = gradient([tile]), gradient([cell(c) for c in range(4)])
    assert len(set(tile.sigma.tolist())) == 2
    assert whole.keys() == summed.keys() and "proj_out.weight" in whole
    largest = max(float(g.abs().max()) for g in whole.values())
    assert largest > 0
    for name, value in whole.items():
        torch.testing.assert_close(value, summed[name], rtol=1e-3, atol=1e-4 * largest, msg=name)


def test_lora_trains_the_adapter_alone(script):
    options = script.parse_options([*TINY, "--lora-rank", "2"])
    network = script.build("qwen", options)
    script.train_tile(network, script.synthetic_cells(network, 1, 2, options), planned_cells=2)
    trained = {name for name, p in network.transformer.named_parameters() if p.grad is not None}
    assert trained and all("lora_" in name for name in trained)


def test_out_of_memory_is_a_row_and_the_sweep_goes_on(script, tmp_path, monkeypatch):
    right = script.train_tile

    def short_of_memory(network, cells, planned_cells):
        if len(cells.x) == 2:
            raise torch.OutOfMemoryError("no memory left")
        right(network, cells, planned_cells)

    monkeypatch.setattr(script, "train_tile", short_of_memory)
    rows = [r for r in rows_of(script, tmp_path, "--models", "qwen") if r["kind"] == "train"]
    assert {(r["samples"], r["transitions"]): r["status"] for r in rows} == {
        tile: "oom" if tile in ((1, 2), (2, 1)) else "ok" for tile in TILES
    }
    assert all((r["ms"] is None) == (r["status"] == "oom") for r in rows)


def test_rows_beyond_the_time_budget_are_skipped_and_say_so(script, tmp_path, capsys):
    rows = rows_of(script, tmp_path, "--budget-s", "1e-6")
    assert {r["model"] for r in rows} == set(MODELS)
    assert {r["status"] for r in rows} == {"skipped: time budget"}
    assert "skipped: time budget" in capsys.readouterr().out


def test_a_row_that_would_end_too_late_is_skipped_before_it_starts(script, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(script, "time", Namespace(perf_counter=lambda: now[0]))

    def measure():
        now[0] += 10.0
        return {"ms": 10.0}

    sweep = script.Sweep({"model": "flux"}, 25.0, [])
    for samples, work in ((1, 1), (2, 2), (1, 1)):  # ends at 10; would end at 30; ends at 20
        sweep.add("train", samples, 1, measure, work)
    assert [r["status"] for r in sweep.rows] == ["ok", "skipped: time budget", "ok"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--models", "sdxl"], "sdxl"),
        (["--models", "flux", "flux"], "names a model twice"),
        (["--no-such-option"], "--no-such-option"),
        (["--depth", "3"], "must be even"),
        (["--attention", "flash"], "available: "),
        (["--dtype", "float16"], "float16"),
        (["--image-size", "1000x1024"], "multiples of 16"),
        (["--image-size", "1024"], "NxN"),
        (["--video-size", "480x832x32"], "4 n + 1"),
        (["--max-cells", "0"], "at least 1"),
        (["--transitions", "10"], "--steps - 1 = 9"),
        (["--budget-s", "0"], "positive"),
        (["--budget-s", "nan"], "positive"),
        (["--json", "/no/such/folder/rows.json"], "no folder"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(script, monkeypatch, capsys, options, message):
    monkeypatch.setattr(script, "build", lambda *_: pytest.fail("a network was built"))
    with pytest.raises(SystemExit) as error:
        script.main([*TINY, *options])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_a_device_is_refused(script, capsys):
    with pytest.raises(SystemExit):
        script.main(["--device", "cuda"])
    assert "no CUDA device" in capsys.readouterr().err
