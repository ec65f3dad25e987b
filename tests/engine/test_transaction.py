"""One optimizer step: any cut into fragments and tiles gives the full-batch gradient; abort leaves no trace (I3)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.engine.harness import (
    Options,
    accumulate,
    build_engine,
    build_sampler,
    distance,
    fragment,
    gradients,
    initial_rows,
    one_step,
    open_transaction,
    rule,
    same_bits,
    snapshot,
    to_rows,
)
from verl_digen.engine.diffusers_fsdp import NonFiniteGradientError, ZeroGradientError
from verl_digen.engine.transaction import TransactionError

EXACT = 1e-12


@pytest.fixture(scope="module")
def engine():
    """In float64; tests that step it restore nothing, so only those that do not step may use it."""
    return build_engine(Options())


@pytest.fixture
def rows():
    return initial_rows("float64")


def gradient_of(engine, step_rule, parts, size=None, *, idle=0, **options) -> dict[str, torch.Tensor]:
    transaction = open_transaction(engine, step_rule, **options)
    for number, part in enumerate(parts):
        accumulate(transaction, part, size, idle=idle, last=number == len(parts) - 1)
    result = gradients(engine)
    assert transaction.cells == 8
    transaction.abort()
    return result


@pytest.fixture(scope="module")
def full(engine):
    """The gradient of all 8 cells in one tile, written out without a transaction."""
    from verl_digen.diffusion.kernels import transition
    from verl_digen.engine.tiles import gather_tile
    from verl_digen.models.family import Guidance

    rows = initial_rows("float64")
    tile = gather_tile(rows, [(s, k) for s in range(4) for k in range(2)], device="cpu", dtype=torch.float64)
    v = engine.family.predict(engine.module, tile.x, tile.sigma, tile.cond, Guidance())
    scored = transition(
        "sde", tile.x, v, tile.sigma, tile.sigma_next, 0.7, x_next=tile.x_next, dtype=torch.float64
    ).log_prob
    loss = -(tile.advantage * torch.exp(scored - scored.detach())).sum() / 8
    names, parameters = zip(*engine.named_trainable(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@pytest.mark.parametrize("tsp", [True, False])
@pytest.mark.parametrize("max_cells", [1, 3, None])
def test_tiles_of_any_size_give_the_full_gradient(engine, rows, full, max_cells, tsp):
    assert distance(gradient_of(engine, rule(tsp=tsp), [rows], max_cells), full) <= EXACT


@pytest.mark.parametrize("cut", [[[3], [0, 2], [1]], [[1, 0, 2], [3]]])
def test_fragments_of_any_size_in_any_order_give_the_full_gradient(engine, rows, full, cut):
    parts = [[rows[i] for i in part] for part in cut]
    assert distance(gradient_of(engine, rule(), parts, 3), full) <= EXACT


def test_idle_tiles_change_nothing(engine, rows, full):
    busy = gradient_of(engine, rule(), [rows], 3)
    assert same_bits(gradient_of(engine, rule(), [rows], 3, idle=2), busy)
    transaction = open_transaction(engine, rule())
    accumulate(transaction, rows)
    transaction.accumulate([], [[], []], idle_row=rows[0], last=True)
    assert distance(gradients(engine), full) <= EXACT and transaction.cells == 8
    transaction.abort()


def test_a_row_whose_weights_moved_is_anchored_by_the_rollout(engine, rows, full):
    """Anchor = rollout log-probs: shifting them scales each cell's gradient by exp(shift), as the ratio does."""
    loose = rule(loss={"clip_low": 0.5, "clip_high": 0.5})
    exact = gradient_of(engine, loose, [rows], on_policy=False)
    assert distance(exact, full) <= 1e-9
    shifted = [replace(r, log_probs=r.log_probs - 0.1) for r in rows]
    scaled = {name: g * torch.exp(torch.tensor(0.1)).double() for name, g in exact.items()}
    assert distance(gradient_of(engine, loose, [shifted], on_policy=False), scaled) <= 1e-7
    assert distance(gradient_of(engine, loose, [shifted], on_policy=True), full) <= EXACT


def moved(row, by=0.01):
    """As a version before would have scored it."""
    return replace(row, log_probs=row.log_probs + by, stale=True)


@pytest.mark.parametrize("correction", ["clip", "decoupled"])
@pytest.mark.parametrize("max_cells", [3, None])
def test_stale_rows_are_corrected_and_fresh_ones_beside_them_are_not(engine, rows, full, correction, max_cells):
    """The log-ratio of stale cells is -0.01, with a clip range of 1e-3: clipped where the advantage is negative."""
    step_rule = rule(correction=correction, split_by_staleness=True)
    mixed = [*rows[:2], *(moved(row) for row in rows[2:])]
    got = gradient_of(engine, step_rule, [mixed], max_cells)
    assert distance(gradient_of(engine, step_rule, [rows], max_cells), full) <= EXACT  # TCSS on, nothing stale
    halves = []
    for part, anchored in ((mixed[:2], False), (mixed[2:], True)):
        alone = open_transaction(engine, rule(), on_policy=not anchored)
        accumulate(alone, part, last=True)
        halves.append(gradients(engine))
        alone.abort()
    if correction == "decoupled":  # no clip: both signs of the advantage count, with the weight exp(-0.01)
        halves[1] = {name: value * math.exp(-0.01) for name, value in gradient_halves(engine, rows)[1].items()}
    expected = {name: halves[0][name] + halves[1][name] for name in halves[0]}
    assert distance(got, expected) <= 1e-9
    assert distance(got, full) > 1e-3


def gradient_halves(engine, rows) -> list[dict[str, torch.Tensor]]:
    halves = []
    for part in (rows[:2], rows[2:]):
        alone = open_transaction(engine, rule())
        accumulate(alone, part, last=True)
        halves.append(gradients(engine))
        alone.abort()
    return halves


def test_ratios_are_told_apart_by_staleness(rows):
    engine = build_engine(Options())
    transaction = open_transaction(engine, rule(split_by_staleness=True))
    accumulate(transaction, [*rows[:2], *(moved(row) for row in rows[2:])], last=True)
    metrics = transaction.commit(8)
    assert metrics["fresh/cells"] == metrics["stale/cells"] == 4
    assert abs(metrics["fresh/ratio_mean"] - 1) <= 1e-9
    assert metrics["stale/ratio_mean"] == pytest.approx(math.exp(-0.01), abs=1e-9)
    assert metrics["stale/clip_low"] == 1.0
    assert metrics["log_prob_gap_max"] <= 1e-9  # of fresh cells: what a newer policy changed is no gap
    plain = open_transaction(engine, rule())
    accumulate(plain, rows, last=True)
    assert not any(name.startswith(("fresh/", "stale/")) for name in plain.commit(8))


def test_gradient_checkpointing_gives_the_same_gradient(rows, full):
    checkpointed = build_engine(Options(model={"enable_gradient_checkpointing": True}))
    assert checkpointed.module.is_gradient_checkpointing
    assert distance(gradient_of(checkpointed, rule(), [rows]), full) <= EXACT


def test_refusals(engine, rows):
    with pytest.raises(TransactionError, match="at least one cell, 0"):
        open_transaction(engine, rule(), cells=0)
    transaction = open_transaction(engine, rule())
    accumulate(transaction, rows[:1])
    with pytest.raises(TransactionError, match=r"transition 0 of sample \(a, 0\) .* twice"):
        accumulate(transaction, rows[:1])
    with pytest.raises(TransactionError, match="2 of 8 planned cells"):
        transaction.commit(transaction.cells)
    transaction.abort()
    transaction = open_transaction(engine, rule(), cells=7)
    with pytest.raises(TransactionError, match=r"0 \+ 8 cells exceed the 7 planned"):
        accumulate(transaction, rows)
    transaction.abort()


def test_a_twice_met_sample_inside_one_fragment_is_refused(engine, rows):
    transaction = open_transaction(engine, rule())
    with pytest.raises(TransactionError, match="twice"):
        accumulate(transaction, [rows[0], rows[0]])
    transaction.abort()


def run_out_of_memory(engine, cells: int, where: str):
    """From now on more than ``cells`` cells do not fit, in the middle of the model; returns what ends it."""

    def cramped(module, inputs, output):
        first = output[0] if isinstance(output, tuple) else output
        if len(first) <= cells:
            return
        if where == "forward":
            raise torch.OutOfMemoryError("no room")

        def fail(gradient):
            raise torch.OutOfMemoryError("no room")

        if first.requires_grad:
            first.register_hook(fail)

    return engine.module.transformer_blocks[0].register_forward_hook(cramped).remove


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])  # bfloat16 is wrapped by FSDP2, with its own accumulator
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_tile_that_does_not_fit_spoils_its_transaction_and_nothing_else(rows, where, dtype):
    engine = build_engine(Options(dtype=dtype))
    rows = rows if dtype == "float64" else initial_rows(dtype)
    plain = gradient_of(engine, rule(), [rows], 2)
    enough = run_out_of_memory(engine, 3, where)
    transaction = open_transaction(engine, rule())
    accumulate(transaction, rows[:1])
    accumulate(transaction, rows[1:], last=True)
    assert transaction.too_large == 6
    with pytest.raises(TransactionError, match="a tile of 6 cells did not fit into memory; commit refused"):
        transaction.commit(8)
    transaction.abort()
    again = gradient_of(engine, rule(), [rows], 2)
    enough()
    assert same_bits(again, plain)


def test_the_first_tile_of_all_may_be_the_one_that_does_not_fit():
    """Neither the reference nor, before its first forward, the module itself has any state of FSDP2 then."""
    engine, rows = build_engine(Options(dtype="bfloat16", reference=True)), initial_rows("bfloat16")
    kl = rule(loss={"kl_beta": 1.0})
    enough = run_out_of_memory(engine, 3, "forward")
    transaction = open_transaction(engine, kl)
    accumulate(transaction, rows, last=True)
    enough()
    assert transaction.too_large == 8
    transaction.abort()
    assert one_step(engine, kl, rows)["kl"] == 0.0


def test_a_cell_that_does_not_fit_is_an_error(rows):
    engine = build_engine(Options())

    def full(*_):
        raise torch.OutOfMemoryError("no room")

    hook = engine.module.register_forward_pre_hook(full)
    transaction = open_transaction(engine, rule())
    with pytest.raises(TransactionError, match="a tile of 8 cells does not fit .*a tile of 1 cell"):
        accumulate(transaction, rows)
    hook.remove()
    transaction.abort()
    one_step(engine, rule(), rows)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_device_that_is_given_away_between_fragments_changes_nothing(rows, dtype):
    """Gradients are with their parameters then, where ``Module.to`` moves them, and nowhere else."""
    engine = build_engine(Options(dtype=dtype))
    rows = rows if dtype == "float64" else initial_rows(dtype)
    plain = gradient_of(engine, rule(), [rows[:2], rows[2:]])
    transaction = open_transaction(engine, rule(), yields=True)
    accumulate(transaction, rows[:2])
    assert all(p.grad is not None for p in engine.trainable_parameters())
    accumulate(transaction, rows[2:], last=True)
    assert distance(gradients(engine), plain) <= (EXACT if dtype == "float64" else 1e-6)
    transaction.abort()


def test_abort_forgets_gradients_that_were_not_reduced_yet():
    engine, rows = build_engine(Options(dtype="bfloat16")), initial_rows("bfloat16")
    clean = gradient_of(engine, rule(), [rows])
    transaction = open_transaction(engine, rule())
    accumulate(transaction, rows[:2])  # not the last: FSDP2 holds the gradient beside the parameters
    transaction.abort()
    assert same_bits(gradient_of(engine, rule(), [rows]), clean)


def test_a_reduction_per_tile_gives_the_same_gradient():
    engine, rows = build_engine(Options(dtype="bfloat16")), initial_rows("bfloat16")
    once = gradient_of(engine, rule(), [rows[:2], rows[2:]], 2)
    each = gradient_of(engine, rule(reduce="tile"), [rows[:2], rows[2:]], 2)
    assert distance(each, once) <= 1e-6


def test_a_scale_at_the_commit_is_a_scale_of_the_advantages(rows):
    scaled, plain = build_engine(Options()), build_engine(Options())
    one_step(plain, rule(), [replace(r, advantage=r.advantage * 0.25) for r in rows])
    transaction = open_transaction(scaled, rule(loss={"adv_max": 0.5}), clamped=False)
    accumulate(transaction, rows, last=True)
    metrics = transaction.commit(8, 0.25)
    a, b = (dict(e.named_trainable()) for e in (scaled, plain))
    assert distance({k: v.detach() for k, v in a.items()}, {k: v.detach() for k, v in b.items()}) <= EXACT
    assert metrics["loss"] == pytest.approx(-sum(0.25 * r.advantage for r in rows) / 4, abs=1e-12)


# ---- tests that step -------------------------------------------------------------------------------------------


def test_abort_and_a_refused_commit_leave_no_trace(rows):
    engine = build_engine(Options(digen={}))
    one_step(engine, rule(), rows)  # so that there is optimizer state
    before = snapshot(engine)
    transaction = open_transaction(engine, rule())
    torch.rand(3)  # work between begin and abort may draw
    accumulate(transaction, rows[:2])
    with pytest.raises(TransactionError):
        transaction.commit(4)
    transaction.abort()
    assert same_bits(snapshot(engine), before)
    assert all(p.grad is None for p in engine.trainable_parameters())
    after = one_step(engine, rule(), rows, on_policy=False)  # and the engine goes on
    assert after["cells"] == 8 and not same_bits(snapshot(engine), before)


def test_a_gradient_that_is_not_finite_steps_nothing(rows):
    engine = build_engine(Options())
    one_step(engine, rule(), rows)
    before, schedule = snapshot(engine), engine.lr_scheduler.state_dict()
    transaction = open_transaction(engine, rule())
    accumulate(transaction, [replace(rows[0], latents=rows[0].latents * float("nan")), *rows[1:]], last=True)
    with pytest.raises(NonFiniteGradientError, match="nan"):
        transaction.commit(8)
    assert same_bits(snapshot(engine), before) and engine.lr_scheduler.state_dict() == schedule
    assert all(p.grad is None for p in engine.trainable_parameters())


@pytest.mark.parametrize("on_policy", [True, False])
def test_a_gradient_that_is_gone_is_no_step(rows, on_policy):
    """Exactly 0 with advantages: an error. Without advantages, or all clipped, 0 is right."""
    engine = build_engine(Options())
    before = snapshot(engine)
    hooks = [p.register_hook(torch.zeros_like) for p in engine.trainable_parameters()]
    with pytest.raises(ZeroGradientError, match="exactly 0, but 8 cells have an advantage .*dtype=float64"):
        one_step(engine, rule(), rows, on_policy=on_policy)
    assert same_bits(snapshot(engine), before)
    for hook in hooks:
        hook.remove()
    flat = [replace(row, advantage=0.0) for row in rows]
    assert one_step(engine, rule(), flat, on_policy=on_policy)["grad_norm"] == 0
    if not on_policy:  # far outside the clip range, on the side that the clip cuts off
        clipped = [replace(row, log_probs=row.log_probs - math.copysign(0.5, row.advantage)) for row in rows]
        assert one_step(engine, rule(), clipped, on_policy=False)["grad_norm"] == 0


@pytest.mark.parametrize("clip_grad", [0, 0.0, None])
def test_no_clipping_is_no_clipping(rows, clip_grad):
    """Taken as a norm, 0 would clip every gradient to nothing."""
    sgd = {"optimizer": "SGD", "lr": 0.1, "weight_decay": 0.0}
    free, bound = (build_engine(Options(optim={**sgd, "clip_grad": clip})) for clip in (clip_grad, 1e9))
    norms = [one_step(engine, rule(), rows)["grad_norm"] for engine in (free, bound)]
    assert norms[0] == norms[1] > 0 and same_bits(snapshot(free), snapshot(bound))
    tight = build_engine(Options(optim={**sgd, "clip_grad": norms[0] / 10}))
    initial = snapshot(tight)
    one_step(tight, rule(), rows)
    moved = {name for name, value in snapshot(tight).items() if not torch.equal(value, initial[name])}
    name = min(moved - {"rng"})
    ratio = (snapshot(free)[name] - initial[name]).norm() / (snapshot(tight)[name] - initial[name]).norm()
    assert ratio.item() == pytest.approx(10, rel=1e-3)


def test_the_first_ratio_is_one_and_the_gap_zero_for_samples_of_the_same_weights():
    """fp32, tile as large as the sampling batch: training recomputes the very log-probs of the rollout."""
    options = Options(dtype="float32")
    engine, sampler = build_engine(options), build_sampler(options)
    sampler.load_weights(engine.get_per_tensor_param()[0], 0)
    rows = to_rows(sampler.run(fragment()), fragment().samples)
    metrics = one_step(engine, rule(tsp=False), rows)
    assert metrics["ratio_max_dev"] == 0.0 and metrics["ratio_mean"] == 1.0
    assert metrics["log_prob_gap_max"] == 0.0 and metrics["log_prob_gap_mean"] == 0.0
    assert metrics["grad_norm"] > 0 and metrics["lr"] == pytest.approx(1e-3) and metrics["cells"] == 8
    # the weights have moved; the same samples are off-policy now, and the rollout anchors them
    moved = one_step(engine, rule(tsp=False), rows, on_policy=False)
    assert moved["log_prob_gap_max"] > 0 and moved["ratio_max_dev"] > 0
    assert moved["ratio_max_dev"] == pytest.approx(moved["log_prob_gap_max"], rel=0.1)


@pytest.mark.parametrize("model", [{"lora_rank": 2}, {}], ids=["lora", "full"])
def test_kl_to_the_initial_policy(rows, model):
    engine = build_engine(Options(model=model, reference=True))
    assert (engine.reference is None) == bool(model) and (engine.lora_bound > 0) == bool(model)
    trained = [name for name, _ in engine.named_trainable()]
    kl = rule(loss={"kl_beta": 1.0})
    assert one_step(engine, kl, rows)["kl"] == 0.0
    # LoRA starts with B = 0: A has no gradient in the first step
    moved = one_step(engine, kl, rows, on_policy=False)
    assert moved["kl"] > 0 and moved["loss"] > moved["policy_loss"]
    assert [name for name, _ in engine.named_trainable()] == trained
    # an idle tile has a KL too, and it must not count
    busy = gradient_of(engine, kl, [rows], on_policy=False)
    assert same_bits(gradient_of(engine, kl, [rows], on_policy=False, idle=1), busy)
