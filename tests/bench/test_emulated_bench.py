"""The emulated bench asks the recipe for the workload's own numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from verl_digen.bench.digits import MODES
from verl_digen.bench.emulated import Plan, overrides_of, scaled, write_data
from verl_digen.bench.predict import predict
from verl_digen.bench.workload import compose_recipe
from verl_digen.config.plan import resolve_plan
from verl_digen.planner.catalog import read_case

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def case_of(name: str, **options):
    case = read_case(yaml.safe_load((RECIPES / "workloads" / f"{name}.yaml").read_text()))
    return scaled(case, **{"scale": 100.0, "groups": None, **options})


@pytest.mark.parametrize(
    ("workload", "groups", "transitions", "batches"), [("wan2.2-5b", 16, 2, 4), ("wan2.1-1.3b", None, 19, 1)]
)
def test_the_run_is_the_workload(tmp_path, workload, groups, transitions, batches):
    case = case_of(workload, groups=groups)
    data = write_data(case, tmp_path)
    options = overrides_of(case, data, 4, 3, 8)
    plan = resolve_plan(compose_recipe(RECIPES, [*MODES["gap+tsp"], *options]))
    assert (plan.prompts, plan.n) == (case.workload.groups, case.workload.samples_per_group)
    assert (plan.replicas, plan.trainer_ranks) == (4, 3)
    assert (plan.transitions, plan.logical_batches, plan.kl_beta) == (transitions, batches, 0.0)
    assert plan.digen.tsp.max_cells == 8 and sorted(plan.digen.rewards) == ["emulated"]
    assert case.costs.denoise_s == pytest.approx({"wan2.2-5b": 0.01358, "wan2.1-1.3b": 0.0013}[workload])


def test_predictions_order_the_modes(tmp_path):
    case = case_of("wan2.2-5b", groups=16)
    data = write_data(case, tmp_path)
    seconds = {}
    for mode in ("one-shot", "gap"):
        plan = resolve_plan(compose_recipe(RECIPES, [*MODES[mode], *overrides_of(case, data, 4, 4, None)]))
        result = predict(plan, case.costs, mode)
        seconds[mode] = result.makespan_s
        assert result.makespan_s >= result.bound.seconds
    generating = 128 * 10 * 0.01358 / 4
    training = 128 * 2 * 0.05742 / 4
    assert seconds["one-shot"] == pytest.approx(generating + training, rel=0.01)
    assert max(generating, training) < seconds["gap"] < seconds["one-shot"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modes": ("colocated",)}, "unknown mode colocated; available: one-shot, gap, gap"),
        ({"modes": ()}, r"unknown mode \(none\)"),
        ({"scale": 0.0}, "scale=0.0"),
        ({"devices": ((0, 4),)}, r"devices 0\+4: both pools"),
    ],
)
def test_bad_plans_are_refused(tmp_path, options, message):
    base = {"workloads": ("w",), "devices": ((1, 1),), "modes": ("gap",), "recipes": RECIPES, "out": tmp_path}
    with pytest.raises(ValueError, match=message):
        Plan(**{**base, **options})
