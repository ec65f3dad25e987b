"""One optimizer step: any cut into fragments and tiles gives the full-batch gradient; abort leaves no trace (I3)."""

from __future__ import annotations

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
from verl_digen.engine.diffusers_fsdp import NonFiniteGradientError
from verl_digen.engine.transaction import TransactionError

EXACT = 1e-12


@pytest.fixture(scope="module")
def engine():
    """In float64; tests that step it restore nothing, so only those that do not step may use it."""
    return build_engine(Options())


@pytest.fixture
def rows():
    return initial_rows("float64")


def gradient_of(engine, step_rule, parts, *, on_policy=True, idle=0) -> dict[str, torch.Tensor]:
    transaction = open_transaction(engine, step_rule, on_policy=on_policy)
    for number, part in enumerate(parts):
        accumulate(transaction, part, idle=idle, last=number == len(parts) - 1)
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
    assert distance(gradient_of(engine, rule(max_cells=max_cells, tsp=tsp), [rows]), full) <= EXACT


@pytest.mark.parametrize("cut", [[[3], [0, 2], [1]], [[1, 0, 2], [3]]])
def test_fragments_of_any_size_in_any_order_give_the_full_gradient(engine, rows, full, cut):
    parts = [[rows[i] for i in part] for part in cut]
    assert distance(gradient_of(engine, rule(max_cells=3), parts), full) <= EXACT


def test_idle_tiles_change_nothing(engine, rows, full):
    busy = gradient_of(engine, rule(max_cells=3), [rows])
    assert same_bits(gradient_of(engine, rule(max_cells=3), [rows], idle=2), busy)
    transaction = open_transaction(engine, rule())
    accumulate(transaction, rows)
    transaction.accumulate([], num_tiles=2, idle_row=rows[0], last=True)
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


def test_gradient_checkpointing_gives_the_same_gradient(rows, full):
    checkpointed = build_engine(Options(model={"enable_gradient_checkpointing": True}))
    assert checkpointed.module.is_gradient_checkpointing
    assert distance(gradient_of(checkpointed, rule(), [rows]), full) <= EXACT


def test_refusals(engine, rows):
    with pytest.raises(TransactionError, match="at least one cell, 0"):
        open_transaction(engine, rule(), cells=0)
    transaction = open_transaction(engine, rule())
    accumulate(transaction, rows[:1])
    with pytest.raises(TransactionError, match=r"\(a, 0\) .* twice"):
        accumulate(transaction, rows[:1])
    with pytest.raises(TransactionError, match="2 of 8 planned cells"):
        transaction.commit(transaction.cells)
    transaction.abort()
    transaction = open_transaction(engine, rule(), cells=7)
    with pytest.raises(TransactionError, match=r"0 \+ 8 cells exceed the 7 planned"):
        accumulate(transaction, rows)
    transaction.abort()
    transaction = open_transaction(engine, rule(max_cells=2))
    with pytest.raises(TransactionError, match="4 tiles on this rank, 3 agreed"):
        accumulate(transaction, rows, idle=-1)
    transaction.abort()


def test_a_twice_met_sample_inside_one_fragment_is_refused(engine, rows):
    transaction = open_transaction(engine, rule())
    with pytest.raises(TransactionError, match="twice"):
        accumulate(transaction, [rows[0], rows[0]])
    transaction.abort()


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
