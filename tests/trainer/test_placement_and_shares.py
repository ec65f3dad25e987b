"""Pure parts of the trainer: placement, shares, checkpoints on disk, merged metrics, grids."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from verl_digen.engine.tiles import cells_of_rank
from verl_digen.trainer.metrics import merge_commits
from verl_digen.trainer.pools import PlacementError, check_placement
from verl_digen.trainer.resume import check_run_state, save_run
from verl_digen.trainer.validate import draw_grid, grid_samples

NODES = [{"GPU": 4, "CPU": 16, "accelerator_type:A": 1}, {"GPU": 4, "CPU": 16, "accelerator_type:B": 1}]


def test_pools_that_fit_pass():
    check_placement({"trainer_pool": [4], "rollout_pool": [4]}, {}, NODES, device="GPU")
    check_placement({"trainer_pool": [4], "rollout_pool": [3], "reward_pool": [0.5, 0.5]}, {}, NODES, device="GPU")
    types = {"trainer_pool": "accelerator_type:B", "rollout_pool": "accelerator_type:A"}
    check_placement({"trainer_pool": [4], "rollout_pool": [4]}, types, NODES, device="GPU")


@pytest.mark.parametrize(
    ("pools", "types", "parts"),
    [
        ({"trainer_pool": [5]}, {}, ("trainer_pool needs 5 GPU", "GPU=4")),
        ({"trainer_pool": [4], "rollout_pool": [4, 1]}, {}, ("rollout_pool needs 1 GPU", "[4, 1]")),
        ({"trainer_pool": [4], "reward_pool": [0.5] * 9}, {}, ("reward_pool needs 0.5 GPU and 1 CPU", "GPU=4")),
        ({"trainer_pool": [1]}, {"trainer_pool": "accelerator_type:C"}, ("accelerator_type:C", "accelerator_type:A=1")),
        (
            {"trainer_pool": [3], "rollout_pool": [3]},
            {"trainer_pool": "accelerator_type:A", "rollout_pool": "accelerator_type:A"},
            ("needs 3 GPU", "accelerator_type:A"),
        ),
    ],
)
def test_pools_that_do_not_fit_list_the_cluster(pools, types, parts):
    with pytest.raises(PlacementError) as caught:
        check_placement(pools, types, NODES, device="GPU")
    for part in (*parts, "n_gpus_per_node"):
        assert part in str(caught.value)


def test_small_fragments_balance_over_the_ranks():
    """4 samples over 3 ranks, without TSP: the rank with two samples changes from fragment to fragment."""
    totals = np.zeros(3, dtype=int)
    for rotate in range(6):
        for rank in range(3):
            tiles, _ = cells_of_rank(4, 2, rank=(rank - rotate) % 3, ranks=3, max_cells=8, tsp=False)
            totals[rank] += sum(map(len, tiles))
    assert totals.tolist() == [16, 16, 16]


def save(root: Path, step: int, keep: int | None = None, fail: bool = False) -> None:
    def write(folder: Path) -> None:
        folder.mkdir()
        (folder / "state.json").write_text(str(step))
        if fail:
            raise OSError("disk full")

    config = SimpleNamespace(default_local_dir=str(root), get=lambda name, default=None: keep)
    save_run(config, {"global_steps": step}, write)


def test_checkpoints_are_complete_or_absent(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path, 2, fail=True)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert not (tmp_path / "global_step_2").exists()
    save(tmp_path, 2)  # what the failed attempt left is no obstacle
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert json.loads((tmp_path / "global_step_2" / "run.json").read_text())["global_steps"] == 2


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    for step in (9, 10, 11):
        save(tmp_path, step, keep=2)
    assert sorted(p.name for p in tmp_path.glob("global_step_*")) == ["global_step_10", "global_step_11"]


def test_another_runs_state_is_refused_with_all_differences():
    saved = {"global_steps": 3, "seed": 1, "prompts_per_step": 2}
    check_run_state(saved, {"global_steps": 9, "seed": 1, "prompts_per_step": 2}, Path("x"))
    with pytest.raises(ValueError, match="seed: 1 -> 2; prompts_per_step: 2 -> 4"):
        check_run_state(saved, {"seed": 2, "prompts_per_step": 4}, Path("x"))


def test_commits_are_merged_by_what_they_are():
    merged = merge_commits(
        [
            {"loss": 1.0, "ratio_max_dev": 0.5, "lr": 1e-3, "commit_s": 1.0, "cells": 10.0, "peak_memory_gb": 3.0},
            {"loss": 3.0, "ratio_max_dev": 0.1, "lr": 5e-4, "commit_s": 2.0, "cells": 20.0, "peak_memory_gb": 2.0},
        ]
    )
    assert merged == {
        "loss": 2.0,
        "ratio_max_dev": 0.5,
        "lr": 5e-4,
        "commit_s": 3.0,
        "cells": 30.0,
        "peak_memory_gb": 3.0,
    }


def test_grids_show_the_same_samples_and_any_image():
    samples = [(f"u{i}", j) for i in range(5) for j in range(4)]
    shown = grid_samples(samples, 7)
    assert len(shown) == len(set(shown)) == 7 and shown == grid_samples(samples, 7)
    assert grid_samples(samples, 0) == [] and grid_samples(samples, 99) == samples
    grey, rgb = np.zeros((8, 8, 1), np.uint8), np.zeros((8, 8, 3), np.uint8)
    video = np.zeros((5, 8, 8, 3), np.uint8)
    figure = draw_grid([grey, rgb, video], [("a", 0.0), ("b", 1.0), ("c", 0.5)], "step 1")
    assert sum(bool(axis.images) for axis in figure.axes) == 3
