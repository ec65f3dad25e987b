"""Checksums of published weights: any bit, name, shape or dtype changes them, the order of tensors does not (I8)."""

from __future__ import annotations

import random

import pytest
import torch

from verl_digen.sync import checksum
from verl_digen.sync.checksum import tensors_checksum, words_sum

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8, torch.int64]


def tensors(dtype: torch.dtype) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (2, 3), "b": (3,), "c": ()}
    return [(n, (torch.randn(s, generator=generator) * 50).to(dtype)) for n, s in shapes.items()]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_single_bit_counts(dtype):
    named = tensors(dtype)
    expected = tensors_checksum(named)
    assert tensors_checksum(tensors(dtype)) == expected
    seen = {expected}
    for _, tensor in named:
        raw = tensor.reshape(-1).view(torch.uint8)
        for position in range(raw.numel()):
            for bit in range(8):
                raw[position] ^= 1 << bit
                seen.add(tensors_checksum(named))
                raw[position] ^= 1 << bit
    assert tensors_checksum(named) == expected
    # all different from each other too, so that no two changed bits can hide one another
    assert len(seen) == 1 + 8 * sum(t.nbytes for _, t in named)


def test_the_order_of_tensors_does_not_count_but_that_of_values_does():
    named = tensors(torch.float32)
    for _ in range(5):
        shuffled = random.Random(1).sample(named, len(named))
        assert tensors_checksum(iter(shuffled)) == tensors_checksum(named)
    swapped = named[0][1].clone()
    swapped[0, 0], swapped[0, 1] = named[0][1][0, 1], named[0][1][0, 0]
    assert tensors_checksum([("a", swapped)]) != tensors_checksum(named[:1])


def test_names_shapes_and_dtypes_count():
    x = torch.arange(12, dtype=torch.float32)
    sums = [
        tensors_checksum(named)
        for named in (
            [("x", x)],
            [("y", x)],
            [("x", x.view(3, 4))],
            [("x", x.view(4, 3))],
            [("x", x.view(torch.int32))],
            [("x", x), ("x", x)],
            [],
        )
    ]
    assert len(set(sums)) == len(sums)


def test_values_count_and_not_how_they_lie_in_memory():
    x = torch.arange(12, dtype=torch.float32).view(3, 4)
    column_major = x.t().contiguous().t()
    assert not column_major.is_contiguous()
    assert tensors_checksum([("x", column_major)]) == tensors_checksum([("x", x)])
    assert tensors_checksum([("x", x.clone().requires_grad_())]) == tensors_checksum([("x", x)])


def test_zero_and_minus_zero_differ_and_nan_is_stable():
    nan = torch.tensor([float("nan"), 0.0])
    assert tensors_checksum([("x", nan)]) == tensors_checksum([("x", nan.clone())])
    assert tensors_checksum([("x", nan)]) != tensors_checksum([("x", torch.tensor([float("nan"), -0.0]))])


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 10, 11])
def test_pieces_do_not_change_the_sum(monkeypatch, chunk):
    x = torch.randn(10)
    words = [w % 2**64 for w in x.view(torch.int32).tolist()]
    expected = sum(w * (2 * i + 1) for i, w in enumerate(words)) % 2**64
    assert words_sum(x) == expected
    monkeypatch.setattr(checksum, "_CHUNK", chunk)
    assert words_sum(x) == expected
