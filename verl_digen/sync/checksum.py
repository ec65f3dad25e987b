"""Checksums of published weights, computed where the tensors are (I8).

A checksum covers names, shapes, dtypes and every bit of the values: each tensor's words are weighted by their position
and summed modulo 2^64 (integer arithmetic: exact, the same on every device and for every order of additions), then
hashed with the name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch

_CHUNK = 1 << 24
# 8-byte values as two words: with 64-bit words, changes of the highest bits of two words would cancel modulo 2^64
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def words_sum(tensor: torch.Tensor) -> int:
    """Position-weighted sum of the tensor's machine words, modulo 2^64."""
    words = tensor.detach().contiguous().view(-1).view(_INTEGER[tensor.element_size()])
    total = 0
    for start in range(0, words.numel(), _CHUNK):
        piece = words[start : start + _CHUNK].to(torch.int64)
        # odd weights are invertible modulo 2^64: no change of a single word goes unseen
        weights = torch.arange(start, start + piece.numel(), device=piece.device, dtype=torch.int64).mul_(2).add_(1)
        total += int((piece * weights).sum())
    return total % (1 << 64)


def tensors_checksum(tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
    """64-bit checksum of named tensors, whatever their order."""
    total = 0
    for name, tensor in tensors:
        text = f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|{words_sum(tensor)}"
        total += int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
    return total % (1 << 64)


def computed_with(
    parameters: Mapping[str, torch.dtype], constants: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, str]:
    """What a side computes with, by name, to be compared with the other side (I11).

    Args:
        parameters: dtype in which each is computed.
        constants: tensors that are no parameters; their values count too.
    """
    dtypes = {name: str(dtype).removeprefix("torch.") for name, dtype in parameters.items()}
    return dtypes | {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {tensors_checksum([(name, tensor)]):016x}"
        for name, tensor in constants
    }
