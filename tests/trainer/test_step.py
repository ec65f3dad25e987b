"""One training step with a scripted rollout and a training group that notes what it is told (I2, I3, I7)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import ray
import torch

from verl_digen.config.digen import AlgorithmConfig, DigenConfig, GapConfig, TspConfig
from verl_digen.config.plan import RunPlan
from verl_digen.diffusion.advantages import group_advantages
from verl_digen.engine.tilesize import TileSize
from verl_digen.engine.transaction import TransactionError
from verl_digen.rollout.requests import (
    Activity,
    FragmentReport,
    GroupResult,
    PromptGroup,
    RolloutError,
    SampleResult,
    Scoring,
)
from verl_digen.schedule.measure import Measured
from verl_digen.sync.calls import results
from verl_digen.trainer.metrics import _rewards, step_metrics
from verl_digen.trainer.step import StepOutcome, TrainingStep

N = 2
GROUPS = [
    PromptGroup(uid=f"g{i}", n=N, prompt="p", negative_prompt="", ground_truth="", data_source="d") for i in range(4)
]


def make_plan(*, one_shot=True, batches=1, epochs=1, ranks=2, **digen) -> RunPlan:
    return RunPlan(
        digen=DigenConfig(gap=GapConfig(enable=not one_shot), tsp=TspConfig(enable=True, max_cells=2), **digen),
        prompts=4,
        n=N,
        logical_batches=batches,
        prompts_per_batch=4 // batches,
        epochs=epochs,
        transitions=3,
        trainer_ranks=ranks,
        replicas=1,
        fragment_size=N,
        one_shot=one_shot,
        loss="flow_grpo",
        clip_low=1e-3,
        clip_high=1e-3,
        kl_beta=0.0,
        lora_rank=0,
        seed=0,
        transformer_parameters=1,
        transformer_bytes=4,
    )


def result(group: PromptGroup, version: int = 7) -> GroupResult:
    samples = [
        SampleResult(
            uid=group.uid,
            j=j,
            reward=float(j * (1 + int(group.uid[1]))),
            extra={"acc": j == 1, "text": "ignored"},
            version=version,
            replica="r",
            transitions=3,
            noise_hash=f"{group.uid}{j}",
        )
        for j in range(N)
    ]
    return GroupResult(group, samples, version, 0.0)


class Manager:
    """Completes groups in a given order; an exception in it is raised."""

    def __init__(self, order):
        self.order = list(order)

    def generate_sequences(self, groups, **_):
        assert groups == GROUPS

    def group_within(self, timeout_s, wait_s):
        return self.next_group(timeout_s)

    def wake(self):
        pass

    def next_group(self, timeout_s):
        item = self.order.pop(0)
        if isinstance(item, BaseException):
            raise item
        return result(GROUPS[item])


class Workers:
    """A training group of 2 ranks that writes down its calls; references are plain values."""

    def __init__(self, fits: int = 1000):
        self.log: list[tuple] = []
        self.fits = fits  # cells that the second rank has room for

    def call(self, method: str, *args):
        return getattr(self, method)(*args)

    def get(self, refs, doing, deadline):
        return results(refs, doing, deadline)

    def when_done(self, refs, then):
        then()  # the Trainer never has anything to do

    def begin(self, planned_cells, on_policy, clamped):
        self.log.append(("begin", planned_cells, on_policy, clamped))
        return [None, None]

    def accumulate(self, fragment):
        self.log.append(("accumulate", fragment))
        too_large = fragment.max_cells if fragment.max_cells > self.fits else 0
        return [
            {"fetch": 0.5, "tiles": 1.0, "tile_times": [(0.0, 1.0, cells)], "too_large": failed}
            for cells, failed in ((4, 0), (2, too_large))
        ]

    def commit(self, scale):
        self.log.append(("commit", scale))
        return [{"commit_s": 0.1, "peak_memory_gb": 1.0, "lr": 1e-3, "grad_norm": 2.0}] * 2

    def abort(self):
        self.log.append(("abort",))
        return ["aborted"] * 2

    @property
    def verbs(self) -> str:
        return " ".join(entry[0] for entry in self.log)

    def trained(self) -> list[list[tuple[str, int]]]:
        """Samples of each commit, in the order in which they were accumulated."""
        commits, now = [], []
        for verb, *rest in self.log:
            if verb == "accumulate":
                now += rest[0].samples
            if verb == "abort":
                now = []
            if verb == "commit":
                commits.append(now)
                now = []
        return commits


@pytest.fixture(autouse=True)
def plain_references(monkeypatch):
    monkeypatch.setattr(ray, "get", lambda refs, timeout=None: list(refs))
    monkeypatch.setattr(ray, "wait", lambda refs, **_: (refs, []))


def run(plan, order, *, tile_size=None, fits: int = 1000) -> tuple[Workers, StepOutcome]:
    workers = Workers(fits)
    step = TrainingStep(plan, workers, Manager(order), tile_size or size_of_tiles(), Measured())
    return workers, step.run(GROUPS, version=7, training_step=1, timing_raw={})


def size_of_tiles(folder="unused", largest: int = 12) -> TileSize:
    return TileSize(str(folder), "this model", largest)


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 0, 1]])
def test_both_orders_of_work_train_the_same_cells_with_the_same_advantages(batches, order):
    whole, one = run(make_plan(batches=batches), order)
    streamed, gap = run(make_plan(batches=batches, one_shot=False), order)
    assert [sorted(c) for c in whole.trained()] == [sorted(c) for c in streamed.trained()]
    size = 4 // batches
    for number, trained in enumerate(whole.trained()):
        uids = {g.uid for g in GROUPS[number * size : (number + 1) * size]}
        assert sorted(trained) == sorted((u, j) for u in uids for j in range(N))
    assert one.advantages == gap.advantages and one.advantage_metrics == gap.advantage_metrics
    assert [g.group.uid for g in one.groups] == [g.group.uid for g in gap.groups] == ["g0", "g1", "g2", "g3"]
    for workers in (whole, streamed):
        assert {e for e in workers.log if e[0] == "begin"} == {("begin", size * N * 3, batches == 1, True)}
        told = {s: a for e in workers.log if e[0] == "accumulate" for s, a in e[1].advantages.items()}
        assert told == one.advantages


def test_streaming_accumulates_in_the_order_of_completion_and_marks_the_last():
    workers, _ = run(make_plan(one_shot=False), [2, 0, 3, 1])
    fragments = [entry[1] for entry in workers.log if entry[0] == "accumulate"]
    assert [next(iter(f.advantages))[0] for f in fragments] == ["g2", "g0", "g3", "g1"]
    assert [f.last for f in fragments] == [False, False, False, True]


def test_a_later_logical_batch_waits_its_turn():
    workers, _ = run(make_plan(one_shot=False, batches=2), [3, 2, 1, 0])
    assert workers.verbs == "begin accumulate accumulate commit begin accumulate commit"  # the second was all there
    assert [{u for u, _ in c} for c in workers.trained()] == [{"g0", "g1"}, {"g2", "g3"}]


@pytest.mark.parametrize("one_shot", [True, False])
def test_epochs_train_every_sample_again(one_shot):
    workers, outcome = run(make_plan(one_shot=one_shot, epochs=2, batches=2), [0, 1, 2, 3])
    assert len(outcome.commits) == 4
    assert [sorted(c) for c in workers.trained()[:2]] == [sorted(c) for c in workers.trained()[2:]]
    assert all(entry[2] is False for entry in workers.log if entry[0] == "begin")


def test_global_norm_scales_centred_rewards_at_the_commit():
    algorithm = AlgorithmConfig(norm="global")
    _, one = run(make_plan(algorithm=algorithm, batches=2), [0, 1, 2, 3])
    streamed, gap = run(make_plan(algorithm=algorithm, batches=2, one_shot=False), [1, 3, 0, 2])
    # rewards of the second logical batch: 0, 3, 0, 4
    assert one.advantages["g3", 1] == pytest.approx(2 / (2.0615528 + 1e-4))
    assert gap.advantages == one.advantages and gap.repeated == 0
    assert all(entry[3] is False for entry in streamed.log if entry[0] == "begin")
    scales = [entry[1] for entry in streamed.log if entry[0] == "commit"]
    told = {s: a for e in streamed.log if e[0] == "accumulate" for s, a in e[1].advantages.items()}
    for (uid, j), advantage in one.advantages.items():
        assert told[uid, j] * scales[uid in ("g2", "g3")] == pytest.approx(advantage)


def test_a_clamp_that_becomes_active_repeats_the_logical_batch():
    """|A| reaches 1.04 in the first logical batch and 0.97 in the second."""
    algorithm = AlgorithmConfig(norm="global", adv_max=1.0)
    streamed, gap = run(make_plan(algorithm=algorithm, batches=2, one_shot=False), [0, 1, 2, 3])
    assert gap.repeated == 1 and len(gap.commits) == 2
    first = "begin accumulate accumulate abort begin accumulate commit"
    assert streamed.verbs == f"{first} begin accumulate accumulate commit"
    assert streamed.log[6] == ("commit", 1.0) and streamed.log[4][3] is True
    assert [sorted(c) for c in streamed.trained()][0] == [("g0", 0), ("g0", 1), ("g1", 0), ("g1", 1)]


@pytest.mark.parametrize("one_shot", [True, False])
@pytest.mark.parametrize("norm", ["group", "global"])
def test_a_logical_batch_that_did_not_fit_is_repeated_from_its_rows_in_smaller_tiles(tmp_path, one_shot, norm):
    plan = make_plan(one_shot=one_shot, batches=2, algorithm=AlgorithmConfig(norm=norm))
    _, plain = run(make_plan(batches=2, algorithm=AlgorithmConfig(norm=norm)), [0, 1, 2, 3])
    size = size_of_tiles(tmp_path)
    workers, outcome = run(plan, [1, 0, 3, 2], tile_size=size, fits=4)
    again = "abort begin accumulate"
    second = "begin accumulate commit" if one_shot else "begin accumulate accumulate commit"
    assert workers.verbs == f"{second.removesuffix(' commit')} {again} {again} commit {second}"
    tiles = [entry[1].max_cells for entry in workers.log if entry[0] == "accumulate"]
    assert sorted(set(tiles), reverse=True) == [12, 6, 3] and outcome.repeated == 2
    assert [sorted(c) for c in workers.trained()] == [
        [("g0", 0), ("g0", 1), ("g1", 0), ("g1", 1)],
        [("g2", 0), ("g2", 1), ("g3", 0), ("g3", 1)],
    ]
    assert outcome.advantages == plain.advantages
    repeated = [entry[1] for entry in workers.log if entry[0] == "accumulate" and entry[1].max_cells == 3][0]
    assert all(repeated.advantages[sample] == plain.advantages[sample] for sample in repeated.samples)
    assert [commit["tile_cells"] for commit in outcome.commits] == [3, 3]
    assert size_of_tiles(tmp_path).cells == 3  # remembered in the run's folder


def test_a_cell_that_does_not_fit_fails_the_step(tmp_path):
    with pytest.raises(TransactionError, match="a tile of 1 cell does not fit into memory; reduce the resolution"):
        run(make_plan(), [0, 1, 2, 3], tile_size=size_of_tiles(tmp_path, 2), fits=0)


@pytest.mark.parametrize("one_shot", [True, False])
@pytest.mark.parametrize("error", [RolloutError("dead"), TimeoutError("late"), KeyboardInterrupt()])
def test_a_failed_step_leaves_no_open_transaction(one_shot, error):
    workers = Workers()
    step = TrainingStep(make_plan(one_shot=one_shot), workers, Manager([0, 1, error]), size_of_tiles(), Measured())
    with pytest.raises(type(error)):
        step.run(GROUPS, version=7, training_step=1, timing_raw={})
    assert workers.verbs.endswith("abort") and "commit" not in workers.verbs


def test_training_that_is_not_done_in_time_is_named(monkeypatch):
    def late(refs, timeout=None):
        raise ray.exceptions.GetTimeoutError

    monkeypatch.setattr(ray, "get", late)
    with pytest.raises(TimeoutError, match="opening a transaction took longer than 3600 s .*train_timeout_s"):
        run(make_plan(), [0, 1, 2, 3])


def test_advantages_follow_the_norm():
    _, group = run(make_plan(), [0, 1, 2, 3])
    assert group.advantages[("g3", 1)] == pytest.approx(2 / (8**0.5 + 1e-4))
    _, none = run(make_plan(algorithm=AlgorithmConfig(norm="none")), [0, 1, 2, 3])
    assert none.advantages == {(f"g{i}", j): (2 * j - 1) * (i + 1) / 2 for i in range(4) for j in range(N)}


# ---- metrics ---------------------------------------------------------------------------------------------------


def report(replica: str, seconds: float, transitions: int) -> FragmentReport:
    return FragmentReport(
        fragment_id=1,
        replica=replica,
        version=7,
        samples=(),
        noise_hashes=(),
        transitions=(transitions,),
        effective={},
        started=10.0,
        ended=10.0 + seconds,
        phases={"encode": 1.0, "denoise": 2.0, "decode": 3.0, "store": 4.0},
        peak_memory_bytes=2**30,
    )


def test_step_metrics():
    plan = make_plan()
    _, outcome = run(plan, [0, 1, 2, 3])
    timing = {"step": 4.0, "gen": 1.0}
    activity = Activity([report("r", 2.0, 3)], [Scoring(1, 0, 2, 5.0, 6.5)])
    metrics = step_metrics(outcome, plan, activity, timing, step=3, epoch=1)
    assert metrics["training/global_step"] == 3 and metrics["training/epoch"] == 1
    assert metrics["reward/mean"] == 1.25 and (metrics["reward/min"], metrics["reward/max"]) == (0, 4)
    assert metrics["reward/group_std_mean"] == pytest.approx(2.5 / 2**0.5) and metrics["reward/zero_std_ratio"] == 0
    assert metrics["reward/extra/acc"] == 0.5 and "reward/extra/text" not in metrics
    assert metrics["perf/samples_per_s"] == 2.0 and metrics["perf/samples_per_s_per_device"] == 1.0
    assert metrics["perf/utilisation_generator"] == 0.5
    assert metrics["perf/groups_at_once"] == 1 and metrics["perf/useful_cells"] == 6 / 8
    assert metrics["perf/utilisation_trainer"] == pytest.approx((2 * 1.5 + 2 * 0.1) / (2 * 4))
    assert metrics["timing_s/denoise"] == 2.0 and metrics["timing_s/tiles"] == 1.0
    assert metrics["perf/reward_worker_s"] == 1.5 and metrics["perf/peak_memory_generator_gb"] == 1.0
    assert metrics["actor/grad_norm"] == 2.0 and metrics["actor/lr"] == 1e-3
    assert metrics["staleness/max"] == 0 and metrics["staleness/stale_ratio"] == 0
    assert not any(name.startswith("advantage/reward") for name in metrics)


def test_staleness_is_what_was_measured_when_a_group_was_taken():
    plan = make_plan()
    _, outcome = run(plan, [0, 1, 2, 3])
    outcome.groups[2].staleness = 1
    metrics = step_metrics(outcome, plan, Activity(), {"step": 1.0}, step=1, epoch=0)
    names = ("staleness/max", "staleness/stale_groups", "staleness/stale_ratio")
    assert [metrics[name] for name in names] == [1, 1, 0.25]


def test_outcome_lists_samples_group_by_group():
    outcome = StepOutcome(groups=[result(GROUPS[1]), result(GROUPS[0])])
    assert [(s.uid, s.j) for s in outcome.samples] == [("g1", 0), ("g1", 1), ("g0", 0), ("g0", 1)]
    assert isinstance(SimpleNamespace(samples=outcome.samples).samples[0], SampleResult)


def test_a_constant_reward_has_no_spread_in_either_metric():
    """Three times 0.1: the rounded mean is not 0.1, so the std is not 0."""
    rewards = [0.1, 0.1, 0.1, 0.1, 0.1, 0.2]
    samples = [SimpleNamespace(reward=reward, extra={}) for reward in rewards]
    outcome = SimpleNamespace(samples=samples, groups=[SimpleNamespace(samples=samples[i : i + 3]) for i in (0, 3)])
    _, statistics = group_advantages(torch.tensor(rewards, dtype=torch.float64), list("aaabbb"))
    assert _rewards(outcome)["reward/zero_std_ratio"] == statistics["zero_std_ratio"] == 0.5
