"""Workload files, the planner and the two commands."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from verl_digen.cli.main import main
from verl_digen.planner.bound import lower_bound
from verl_digen.planner.candidates import Search
from verl_digen.planner.catalog import read_case, read_testbed
from verl_digen.planner.plan import plan
from verl_digen.planner.shared import plan_colocated
from verl_digen.planner.simulate import simulate
from verl_digen.schedule.profile import Profile
from verl_digen.schedule.work import Pools, Replica, Schedule, TrainerPool, Workload

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "workload": {"name": "small", "groups": 4, "samples_per_group": 2, "denoise_steps": 10, "trained_transitions": 5},
    "costs": {"denoise_s": 1.0, "train_cell_s": 2.0, "score_s": 0.5, "commit_s": 0.5, "publish_s": 1.0},
    "memory": {"rollout_gib": 20, "trainer_state_gib": 60, "cell_gib": 5},
}
EIGHT = {"name": "eight", "groups": [{"name": "gpu", "count": 8, "memory_gib": 24}]}


def test_workload_refuses_impossible_sizes():
    with pytest.raises(ValueError, match="trained_transitions=9 exceeds denoise_steps=8"):
        Workload(name="w", groups=1, samples_per_group=1, denoise_steps=8, trained_transitions=9)
    with pytest.raises(ValueError, match="groups=5 is not divisible by logical_batches=2"):
        Workload(name="w", groups=5, samples_per_group=1, denoise_steps=8, trained_transitions=1, logical_batches=2)
    with pytest.raises(ValueError, match="replicas take 1 and the Trainer 2"):
        Pools(replicas=(Replica(name="a"),), trainer=TrainerPool(ranks=2), colocated=True)


def test_bound_terms_by_hand():
    """2 unlike replicas (summed speed 1.5), 2 ranks, 8 samples of 10 s, 40 cells of 2 s."""
    work = Workload(name="w", groups=4, samples_per_group=2, denoise_steps=10, trained_transitions=5)
    replicas = (Replica(name="a"), Replica(name="b", speed=0.5))
    pools = Pools(replicas=replicas, trainer=TrainerPool(ranks=2))
    profile = Profile(denoise_s=1.0, train_cell_s=2.0, score_s=0.5, commit_s=1.0, publish_s=3.0, helper_denoise_s=2.0)
    plain = lower_bound(work, pools, profile, Schedule(tsp=True))
    assert plain.generation_s == pytest.approx(80 / 1.5)
    assert plain.training_s == pytest.approx(41.0)
    assert plain.closing_chain_s == pytest.approx(80 / 1.5 + 0.5 + 10.0 + 1.0 + 3.0)
    assert plain.opening_chain_s == pytest.approx(3.0 + 20 / 1.5 + 0.5 + 41.0)
    helped = lower_bound(work, pools, profile, Schedule(tsp=True, policy="bts", max_stale_ratio=1.0))
    assert helped.work_s == pytest.approx((80 + 1.0 * 41.0) / (1.5 + 1.0))  # helper: two ranks, half as fast each
    assert helped.seconds == pytest.approx(max(41.0, 48.4))


def test_workload_files_load_and_unknown_keys_are_refused():
    files = list((ROOT / "recipes" / "workloads").glob("*.yaml"))
    assert len(files) >= 8
    for path in files:
        case = read_case(yaml.safe_load(path.read_text(encoding="utf-8")), path.name)
        assert case.workload.name == path.stem and case.source
    with pytest.raises(ValueError, match=r"costs: unknown keys \['train_s'\], missing keys \['train_cell_s'\]"):
        read_case({**SMALL, "costs": {"denoise_s": 1.0, "train_s": 2.0}})
    with pytest.raises(ValueError, match="unknown keys .'extra'"):
        read_case({**SMALL, "extra": 1})
    with pytest.raises(ValueError, match="trained_fraction=1.5"):
        read_case(SMALL).resized(10, 1.5)


def test_communication_follows_the_trainers_network():
    case = read_case({**SMALL, "communication": {"gathered_gib": 20.0, "published_gib": 20.0, "exposed": 0.5}})
    slow = read_testbed({"name": "n", "groups": [{"name": "g", "count": 8, "bandwidth_gib_s": 10.0}]}).groups[0]
    profile = case.profile(slow, 4)
    assert profile.tile_fixed_s == pytest.approx(3 * 20 * 0.5 * 0.75 / 10)
    assert profile.publish_s == pytest.approx(1.0 + 2.0)
    assert case.profile(slow, 1).tile_fixed_s == 0.0


def test_planner_respects_memory_and_is_no_worse_than_its_own_alternatives():
    case, bed = read_case(SMALL), read_testbed(EIGHT)
    found = plan(case, bed, Search(stale_ratios=(0.0, 1.0)))
    usable = 24 * 0.92
    for choice in found.choices:
        candidate = choice.candidate
        ranks = candidate.pools.trainer.ranks
        assert candidate.pools.devices <= 8
        assert case.memory.trainer_need(ranks, candidate.schedule.max_cells) <= usable + 1e-9
        assert case.memory.rollout_need(candidate.width, candidate.schedule.rollout_batch) <= usable
    assert found.rejected_for_memory > 0  # a Trainer of two ranks would need 30 GiB
    times = {
        (c.candidate.schedule.policy, c.candidate.schedule.max_stale_ratio): c.simulation.makespan_s
        for c in found.choices
    }
    assert list(times.values()) == sorted(times.values())
    assert times["steps", 0.0] <= times["none", 0.0] * 1.01
    assert times["steps", 1.0] <= times["steps", 0.0] * 1.01
    # By exhaustive simulation of the splits with the winner's other settings, no split is much better.
    best = found.best.candidate
    for generator in range(1, 5):
        replicas = tuple(Replica(name=f"r{index}") for index in range(generator))
        pools = Pools(replicas=replicas, trainer=TrainerPool(ranks=8 - generator))
        other = simulate(case.workload, pools, best.profile, replace(best.schedule, max_cells=1), steps=12)
        assert found.best.simulation.makespan_s <= other.makespan_s * 1.01


def test_planner_uses_unlike_groups_and_says_why_nothing_fits():
    both = read_testbed(
        {
            "name": "both",
            "groups": [
                {"name": "x", "count": 4, "memory_gib": 24},
                {"name": "y", "count": 4, "speed": 2.0, "memory_gib": 48},
            ],
        }
    )
    found = plan(read_case(SMALL), both, Search(policies=("none",)))
    assert found.best.candidate.pools.devices == 8
    tight = {**SMALL, "memory": {"rollout_gib": 20, "trainer_state_gib": 600, "cell_gib": 5}}
    with pytest.raises(ValueError, match="none of .* placements .* fits into memory; last: .*GiB"):
        plan(read_case(tight), read_testbed(EIGHT))
    with pytest.raises(ValueError, match="policies is empty"):
        Search(policies=())
    with pytest.raises(ValueError, match="does not fit colocated"):
        plan_colocated(read_case(tight), read_testbed(EIGHT))


def test_planner_can_be_held_to_a_split():
    found = plan(read_case(SMALL), read_testbed(EIGHT), Search(policies=("none",), generator=2, tsp=False))
    assert dict(found.best.candidate.generator) == {"gpu": 2}
    assert not found.best.candidate.schedule.tsp


COSTS = (
    {},
    {"train_cell_s": 6.0, "publish_s": 4.0},
    {"denoise_s": 3.0, "tile_fixed_s": 1.0, "helper_denoise_s": 4.0},
    {"tile_fixed_s": 2.0, "publish_s": 8.0},
)


def planned(extra, **options):
    """Choices by policy and ratio for other costs of the small case on eight devices."""
    case = read_case({**SMALL, "costs": {**SMALL["costs"], **extra}})
    choices = plan(case, read_testbed(EIGHT), Search(**options)).choices
    return case, {(c.candidate.schedule.policy, c.candidate.schedule.max_stale_ratio): c for c in choices}


@pytest.mark.parametrize("extra", COSTS)
def test_more_policies_and_ratios_to_choose_from_are_never_slower(extra):
    orders = [
        {"policies": ("none",)},
        {"policies": ("steps", "none")},
        {"policies": ("none", "greedy", "bts", "steps")},
        {"policies": ("none", "greedy", "bts", "steps"), "stale_ratios": (0.0, 1.0)},
    ]
    plans = [planned(extra, shortlist=3, variations=4, **options)[1] for options in orders]
    for fewer, more in zip(plans, plans[1:], strict=False):
        for key, choice in fewer.items():
            assert more[key].simulation.makespan_s <= choice.simulation.makespan_s
        assert min(c.simulation.makespan_s for c in more.values()) <= min(
            c.simulation.makespan_s for c in fewer.values()
        )


@pytest.mark.parametrize("extra", COSTS)
def test_planners_split_is_no_worse_than_any_fixed_split(extra):
    options = {"policies": ("none", "greedy", "steps"), "stale_ratios": (0.0, 1.0)}
    _, free = planned(extra, **options)
    for generator in range(1, 5):
        for key, choice in planned(extra, generator=generator, **options)[1].items():
            assert free[key].simulation.makespan_s <= choice.simulation.makespan_s * 1.005


@pytest.mark.parametrize("extra", COSTS[1:])
def test_variations_are_never_slower_and_fit_into_memory(extra):
    options = {"policies": ("none", "greedy", "steps"), "stale_ratios": (0.0, 1.0), "shortlist": 1}
    case, varied = planned(extra, **options)
    _, bare = planned(extra, variations=0, **options)
    fastest = [min(c.simulation.makespan_s for c in choices.values()) for choices in (varied, bare)]
    assert fastest[0] <= fastest[1]
    for choice in varied.values():
        candidate, usable = choice.candidate, 24 * 0.92
        ranks = candidate.pools.trainer.ranks
        assert case.memory.trainer_need(ranks, candidate.schedule.max_cells) <= usable
        assert case.memory.rollout_need(candidate.width, candidate.schedule.rollout_batch) <= usable
        assert candidate.pools.devices <= 8


def test_variations_reach_splits_that_were_left_out_but_keep_a_given_one():
    few = {"policies": ("none",), "splits": 2, "widths": (1,)}
    _, bare = planned({}, variations=0, **few)
    _, varied = planned({}, **few)
    assert dict(bare["none", 0.0].candidate.generator) == {"gpu": 1}
    assert varied["none", 0.0].simulation.makespan_s < 0.5 * bare["none", 0.0].simulation.makespan_s
    _, held = planned({}, generator=3, policies=("none", "steps"))
    assert all(dict(choice.candidate.generator) == {"gpu": 3} for choice in held.values())


@pytest.mark.parametrize("extra", COSTS)
def test_every_policy_tries_what_won_for_the_others(extra):
    options = {"policies": ("none", "greedy", "bts", "steps"), "stale_ratios": (0.0, 1.0)}
    case, rows = planned(extra, shortlist=1, variations=0, **options)
    for (policy, ratio), row in rows.items():
        for other in rows.values():
            candidate = other.candidate
            schedule = replace(candidate.schedule, policy=policy, max_stale_ratio=ratio)
            result = simulate(case.workload, candidate.pools, candidate.profile, schedule, steps=12)
            assert row.simulation.makespan_s <= 1.02 * result.makespan_s


@pytest.mark.parametrize("change", [{"variations": -1}, {"finalists": 0}, {"shortlist": 0}])
def test_search_refuses_impossible_sizes(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        Search(**change)


@pytest.fixture
def files(tmp_path, monkeypatch):
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))
    (tmp_path / "beds.yaml").write_text(yaml.safe_dump({"eight": {"groups": EIGHT["groups"]}}))
    monkeypatch.chdir(tmp_path)
    return ["small.yaml", "--testbeds", "beds.yaml", "--testbed", "eight"]


KEYS = {"workload", "mode", "policy", "makespan_s", "bound_s", "utilisation"}


def test_simulate_command(files, capsys, tmp_path):
    assert main(["simulate", *files, "--generator", "3", "--json", "--picture", "p.png", "--trace", "t.json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert all(set(row) >= KEYS for row in rows)
    assert [row["mode"] for row in rows][:5] == ["colocated", "one-batch-ahead", "one-shot", "gap", "gap+tsp"]
    assert (tmp_path / "p.png").stat().st_size < 150_000
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    options = ["--modes", "gap+tsp+tag", "--policies", "fixed", "--json", "--jitter", "0.2", "--stragglers", "0.1:2"]
    times = []
    for extra in (["--fixed-k", "0"], ["--fixed-k", "1"], ["--fixed-k", "1", "--seed", "3"], ["--fail", "0:5:20"]):
        assert main(["simulate", *files, "--generator", "3", *options, *extra]) == 0
        times.append(json.loads(capsys.readouterr().out)[0]["makespan_s"])
    assert len(set(times)) == 4  # every option changes the run
    assert main(["simulate", *files, "--modes", "gap", "--bubbles", "--steps", "2"]) == 0
    assert "simulated" in capsys.readouterr().out
    assert main(["simulate", *files, "--benchmark"]) == 0
    assert json.loads(capsys.readouterr().out)["events_per_cpu_s"] > 0


def test_plan_command(files, capsys):
    assert main(["plan", *files, "--json", "--policies", "none,bts", "--stale-ratios", "0,1"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert all(set(row) >= KEYS for row in rows)
    assert {row["placement"] for row in rows} == {"disaggregated", "colocated", "zero-copy", "lending"}
    splits = [row["mode"] for row in rows if row["placement"] == "disaggregated"]
    assert sorted(splits) == ["gap+tsp", "gap+tsp+tag", "gap+tsp+tag+tcss", "gap+tsp+tcss"]
    assert main(["plan", *files, "--policies", "none"]) == 0
    assert "candidates" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--generator", "9"], "--generator 9"),
        (["--modes", "magic"], "unknown mode 'magic'"),
        (["--testbed", "moon"], "no testbed 'moon'"),
        (["--max-stale-ratio", "2"], "max_stale_ratio=2.0"),
        (["--fail", "0:1:1", "--generator", "3"], "leave out the mode 'colocated'"),
    ],
)
def test_commands_say_what_is_wrong(files, capsys, arguments, message):
    assert main(["simulate", *files, *arguments]) == 2
    assert message in capsys.readouterr().err
