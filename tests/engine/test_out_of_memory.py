"""One of two real gloo ranks runs out of memory in the middle of a tile, while the other is inside its collectives."""

from __future__ import annotations

import traceback
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.engine.harness import (
    STEPS,
    Options,
    accumulate,
    build_engine,
    build_sampler,
    fragment,
    gradients,
    initial_rows,
    open_transaction,
    rule,
    same_bits,
)
from verl_digen.config.digen import TspConfig
from verl_digen.engine.tilesize import FILE, DryRun, TileSize
from verl_digen.engine.transaction import TransactionError

ENGINES = {
    "full, KL": {"reference": True},
    "lora, KL": {"reference": True, "model": {"lora_rank": 2}},
    "whole": {"fsdp": {"reshard_after_forward": False}},
}


@contextmanager
def short_of_memory(engine, cells: int, where: str):
    """More than ``cells`` cells do not fit, in the last block of the model."""

    def cramped(module, inputs, output):
        last = output[-1] if isinstance(output, tuple) else output
        if len(last) <= cells:
            return
        if where == "forward":
            raise torch.OutOfMemoryError("no room")

        def fail(gradient):
            raise torch.OutOfMemoryError("no room")

        if last.requires_grad:
            last.register_hook(fail)

    hook = engine.module.transformer_blocks[-1].register_forward_hook(cramped)
    yield
    hook.remove()


def gradient(engine, step_rule, rank: int) -> dict[str, torch.Tensor]:
    """Of both ranks, in tiles of one cell and in two fragments."""
    rows = initial_rows("float64")
    transaction = open_transaction(engine, step_rule)
    accumulate(transaction, rows[:2], 1, rank=rank, ranks=2)
    accumulate(transaction, rows[2:], 1, rank=rank, ranks=2, last=True)
    assert transaction.too_large == 0
    result = gradients(engine)
    transaction.abort()
    return result


def spoil(engine, step_rule, rank: int, where: str, failing: int) -> None:
    """A transaction in which rank 1 fails in one of its two fragments, and goes on with the other one."""
    rows = initial_rows("float64")
    transaction = open_transaction(engine, step_rule)
    for number, part in enumerate((rows[:2], rows[2:])):
        with short_of_memory(engine, 1 if rank == 1 and number == failing else 9, where):
            accumulate(transaction, part, 2, rank=rank, ranks=2, last=number == 1)
    assert transaction.too_large == (2 if rank == 1 else 0)
    transaction.abort()


def dry_run(engine, step_rule, rank: int, auto: bool, total: int | None) -> DryRun:
    engine.module.train()
    cond = initial_rows("float64")[0].cond
    tsp = TspConfig(auto=auto)
    shape = initial_rows("float64")[0].latents.shape[1:]
    return DryRun(engine, step_rule, tsp, latent_shape=shape, cond=cond, negative=None, total=total)


def both_ranks(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    for name, options in ENGINES.items():
        engine = build_engine(Options(**options))
        for reduce in ("transaction", "tile") if name == "full, KL" else ("transaction",):
            step_rule = rule(reduce=reduce, loss={"kl_beta": 0.5 * options.get("reference", False)})
            plain = gradient(engine, step_rule, rank)
            for where in ("forward", "backward"):
                for number in (0, 1):  # the last fragment reduces gradients over the ranks
                    spoil(engine, step_rule, rank, where, number)
            assert same_bits(gradient(engine, step_rule, rank), plain), (name, reduce)
    with short_of_memory(engine, 3 if rank == 1 else 9, "backward"):
        assert dry_run(engine, step_rule, rank, False, None).find(8) == 2  # 8, 4 and then 2, on both ranks
        assert dry_run(engine, step_rule, rank, True, None).find(8) <= 2
    assert dry_run(engine, step_rule, rank, False, None).find(8) == 8
    dist.destroy_process_group()


def run(rank: int, folder: str) -> None:
    try:
        both_ranks(rank, folder)
    except BaseException:
        traceback.print_exc()
        raise


def test_the_other_rank_does_not_wait_for_ever_and_nothing_of_the_transaction_stays(tmp_path):
    torch.multiprocessing.spawn(run, args=(str(tmp_path),), nprocs=2)


def test_a_dry_run_stays_within_the_share_of_memory(monkeypatch):
    """The peak counts, and what the optimizer will take at its first step."""
    engine = build_engine(Options())
    monkeypatch.setattr("verl_digen.engine.tilesize.peak_memory_bytes", lambda: 600)
    state = 2 * 8 * sum(p.numel() for p in engine.trainable_parameters())
    assert dry_run(engine, rule(), 0, False, (1000 + state) / 0.9).find(4) == 4
    with pytest.raises(TransactionError, match="a tile of 1 cell does not fit into memory; reduce the resolution"):
        dry_run(engine, rule(), 0, False, (599 + state) / 0.9).find(4)


def test_the_size_is_remembered_for_a_model_and_shape(tmp_path):
    size = TileSize(str(tmp_path), "model a", 12)
    assert (size.cells, size.known) == (12, False) and not (tmp_path / FILE).exists()
    size.found(10)
    size.halve(10)
    TileSize(str(tmp_path), "model b", 7).found(7)
    again = TileSize(str(tmp_path), "model a", 12)
    assert (again.cells, again.known) == (5, True)
    assert TileSize(str(tmp_path), "model a", 3).cells == 3  # the plan asks for less now
    assert TileSize(str(tmp_path), "model b", 12).cells == 7
    with pytest.raises(TransactionError, match="1 cell does not fit"):
        again.halve(1)


@pytest.mark.parametrize("validate", [False, True])
def test_a_batch_of_samples_that_does_not_fit_is_halved(validate):
    """4 samples, then 2, of which one half fits; the next batch is not tried whole again."""
    sampler = build_sampler(Options())
    work = fragment()
    if validate:
        work = replace(work, groups={uid: replace(g, partition="val") for uid, g in work.groups.items()})
    whole = sampler.run(work)
    tried = []

    def cramped(module, inputs, output):
        tried.append(len(output[-1]))
        if tried[-1] > 2:
            raise torch.OutOfMemoryError("no room")

    sampler.transformer.transformer_blocks[-1].register_forward_hook(cramped)
    for expected in ([4, *[2] * STEPS * 2], [2] * STEPS * 2):
        tried.clear()
        halves = sampler.run(work)
        assert tried == expected
        assert halves.noise_hashes == whole.noise_hashes and halves.selections == whole.selections
        assert halves.result.starts == whole.result.starts and halves.embeddings.keys() == whole.embeddings.keys()
        assert torch.allclose(halves.result.x_final, whole.result.x_final, rtol=0, atol=1e-12)
        assert halves.pixels.shape == whole.pixels.shape
        for name in ("latents", "sigmas", "log_probs"):
            for a, b in zip(getattr(halves.result, name), getattr(whole.result, name), strict=True):
                assert torch.allclose(a, b, rtol=0, atol=1e-9)

    def full(*_):
        raise torch.OutOfMemoryError("no room")

    sampler.transformer.register_forward_pre_hook(full)
    with pytest.raises(torch.OutOfMemoryError):
        sampler.run(work)
