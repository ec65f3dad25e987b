"""Placements beside a split, and a choice as options of ``main_ppo``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.config.harness import digits, digits_dir  # noqa: F401 - fixtures
from tests.planner.test_plan import EIGHT, SMALL
from verl_digen.cli.main import main
from verl_digen.config.plan import resolve_plan
from verl_digen.planner.candidates import Search
from verl_digen.planner.catalog import read_case, read_testbed
from verl_digen.planner.overrides import overrides_of
from verl_digen.planner.plan import Choice, plan, play
from verl_digen.planner.shared import own_module, plan_colocated, plan_lending, plan_shared

BED = read_testbed(EIGHT)
FAST = {"policies": ("none",), "widths": (1,), "shortlist": 3, "variations": 0}


def small(**changes):
    return read_case({**SMALL, **{name: {**SMALL.get(name, {}), **more} for name, more in changes.items()}})


def test_zero_copy_generates_with_the_training_module_and_publishes_nothing():
    """8 samples on 8 ranks: 10 steps at 1.5 s of the training module, then 5 cells at 2 s, score and commit."""
    case = small(costs={"helper_denoise_s": 1.5, "publish_s": 7.0, "phase_switch_s": 4.0})
    shared = plan_colocated(case, BED, zero_copy=True)
    assert shared.simulation.step_s[-1] == pytest.approx(15.0 + 0.5 + 10.0 + 0.5)
    copied = plan_colocated(case, BED)
    assert copied.simulation.step_s[-1] == pytest.approx(10.0 + 0.5 + 10.0 + 0.5 + 7.0 + 2 * 4.0)
    assert (shared.candidate.placement, copied.candidate.placement) == ("zero-copy", "colocated")
    bare = own_module(small().costs)
    assert bare.denoise_s == 1.0 and bare.publish_s == 0.0  # the rollout's cost where no other is given


def test_zero_copy_needs_the_memory_of_one_copy():
    """A replica of its own takes 30 GiB of 22; the Trainer's shard and a cell fit."""
    case = small(memory={"rollout_gib": 30})
    with pytest.raises(ValueError, match="does not fit colocated .* replica of one device 30.0 GiB"):
        plan_colocated(case, BED, Search(widths=(1,)))
    assert plan_colocated(case, BED, Search(widths=(1,)), zero_copy=True).simulation.makespan_s > 0
    found = plan(small(), BED, Search(**FAST)).choices
    assert {c.candidate.placement for c in plan_shared(case, BED, found, Search(widths=(1,)))} == {
        "zero-copy",
        "lending",
    }
    with pytest.raises(ValueError, match="does not fit zero-copy colocated"):
        plan_colocated(small(memory={"trainer_state_gib": 600}), BED, zero_copy=True)


def test_lending_is_whole_batches_with_an_idle_trainer_that_helps():
    case = small(costs={"denoise_s": 3.0, "helper_denoise_s": 3.0})
    found = plan(case, BED, Search(**FAST)).choices
    lent = plan_lending(case, found)
    assert lent.candidate.schedule.barrier and lent.candidate.pools == found[0].candidate.pools
    alone = replace(lent.candidate, schedule=replace(lent.candidate.schedule, policy="none"))
    assert lent.simulation.makespan_s < play(case, alone, 10).makespan_s


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_overrides_give_the_pools_and_the_schedule_of_the_choice(digits, ratio):  # noqa: F811
    search = Search(**FAST, stale_ratios=(ratio,))
    choice = plan(small(), BED, search).best
    resolved = resolve_plan(digits(*overrides_of(choice, devices_per_node=4)))
    pools, schedule = choice.candidate.pools, choice.candidate.schedule
    assert (resolved.trainer_ranks, resolved.replicas) == (pools.trainer.devices, len(pools.replicas))
    assert resolved.digen.gap.enable and resolved.digen.gap.fragment_size == schedule.rollout_batch
    assert (resolved.digen.tsp.enable, resolved.digen.tsp.max_cells) == (schedule.tsp, schedule.max_cells)
    assert resolved.digen.tcss.enable == (ratio > 0) and (not ratio or resolved.digen.tcss.max_stale_ratio == ratio)


def test_overrides_of_a_colocated_choice(digits):  # noqa: F811
    choice = plan_colocated(small(), BED, Search(widths=(1,)))
    resolved = resolve_plan(digits(*overrides_of(choice, devices_per_node=4)))
    assert resolved.digen.placement == "colocated" and resolved.trainer_ranks == resolved.replicas == 8
    assert resolved.one_shot and resolved.fragment_size == choice.candidate.schedule.rollout_batch


def test_what_a_live_run_cannot_do_is_no_override():
    choice = plan(small(), BED, Search(**FAST)).best
    wide = replace(choice.candidate, width=2)
    helped = replace(choice.candidate, schedule=replace(choice.candidate.schedule, policy="bts"))
    for candidate, why in (
        (wide, "--widths 1"),
        (helped, "'bts' is simulated only"),
        (plan_colocated(small(), BED, zero_copy=True).candidate, "'zero-copy' is simulated only"),
    ):
        with pytest.raises(ValueError, match=why):
            overrides_of(Choice(candidate, choice.simulation), devices_per_node=8)


def test_the_command_names_the_winner_and_prints_overrides(tmp_path, capsys):
    (tmp_path / "w.yaml").write_text(yaml.safe_dump({**SMALL, "costs": {**SMALL["costs"], "publish_s": 50.0}}))
    (tmp_path / "beds.yaml").write_text(yaml.safe_dump({"eight": {"groups": EIGHT["groups"]}}))
    files = [str(tmp_path / "w.yaml"), "--testbed", "eight", "--testbeds", str(Path(tmp_path, "beds.yaml"))]
    assert main(["plan", *files, "--policies", "none", "--widths", "1", "--shortlist", "3"]) == 0
    out = capsys.readouterr().out
    assert "zero-copy is faster than every split" in out and "trainer.v1.digen.placement=" in out
