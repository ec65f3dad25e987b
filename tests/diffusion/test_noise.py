"""Noise belongs to the sample: not to the batch, the order, the dtype or the place."""

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_digen.diffusion.noise import (
    PURPOSES,
    check_distinct,
    draw,
    initial_noise,
    noise_hash,
    sample_key,
    transition_noise,
)

SHAPE = (4, 6, 5)
SAMPLES = [(f"prompt-{p}", j) for p in range(4) for j in range(4)]

KNOWN_KEY = 10951760056619854082
KNOWN_DRAW = [0.875622, 0.484335, -1.219051]

KEYS = st.tuples(
    st.integers(-(2**70), 2**70),
    st.text(max_size=8),
    st.integers(0, 2**40),
    st.sampled_from(PURPOSES),
    st.integers(0, 2**40),
)


@given(KEYS, KEYS)
def test_keys_are_64_bit_and_differ_when_any_part_differs(a, b):
    assert 0 <= sample_key(*a) < 2**64
    assert (sample_key(*a) == sample_key(*b)) == (a == b)


@pytest.mark.parametrize("left", [(1, "1:a", 2, "init", 3), (1, "a", 12, "init", 3), (11, "a", 2, "init", 3)])
@pytest.mark.parametrize("right", [(1, "1", 2, "init", 3), (1, "a1", 2, "init", 3), (1, "1a", 2, "init", 3)])
def test_encoding_is_unambiguous(left, right):
    assert sample_key(*left) != sample_key(*right)


def test_key_is_the_same_in_every_process():
    """Known values: Python's own hash() would differ between processes, and resumed runs would draw other noise."""
    assert sample_key(0, "a", 0, "init") == KNOWN_KEY
    torch.testing.assert_close(draw(KNOWN_KEY, (16,))[:3], torch.tensor(KNOWN_DRAW), rtol=0, atol=1e-6)


def test_bad_keys_are_refused():
    with pytest.raises(ValueError, match="unknown noise purpose 'sde'; available: init, transition, window"):
        sample_key(0, "a", 0, "sde")
    with pytest.raises(ValueError, match="j=-1"):
        sample_key(0, "a", -1, "init")
    with pytest.raises(ValueError, match="index=-2"):
        sample_key(0, "a", 0, "init", -2)
    with pytest.raises(ValueError, match="2\\*\\*64"):
        draw(2**64, SHAPE)


@given(st.integers(0, 2**64 - 1), st.integers(0, 63))
def test_every_bit_of_the_key_counts(key, bit):
    """torch's CPU generator keeps the low 32 bits of a seed only."""
    assert not torch.equal(draw(key, (16,)), draw(key ^ (1 << bit), (16,)))


@pytest.mark.parametrize("key", [0, 12345 << 32, (77 << 32) | 77, 2**64 - 1])
def test_draws_are_standard_normal(key):
    x = draw(key, (200_000,)).double()
    assert x.mean().abs() < 0.01 and (x.std() - 1).abs() < 0.01
    assert ((x**4).mean() - 3).abs() < 0.1
    for level in (0.5, 1.0, 2.0):
        assert abs((x > level).double().mean().item() - 0.5 * math.erfc(level / math.sqrt(2))) < 0.005


def test_values_do_not_depend_on_dtype_or_on_the_global_generator():
    torch.manual_seed(0)
    first = draw(99, SHAPE)
    state = torch.random.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(draw(99, SHAPE), first)
    assert torch.equal(draw(99, SHAPE, torch.float64), first.double())
    assert torch.equal(draw(99, SHAPE, torch.bfloat16), first.bfloat16())
    torch.manual_seed(0)
    draw(99, SHAPE)
    assert torch.equal(torch.random.get_rng_state(), state), "a draw must not use the global generator"


@given(st.randoms(use_true_random=False), st.integers(1, len(SAMPLES)), st.booleans())
def test_noise_does_not_depend_on_batch_order_or_rank(rng: random.Random, size, same_noise):
    whole = dict(zip(SAMPLES, initial_noise(5, SAMPLES, SHAPE, same_noise), strict=True))
    step = dict(zip(SAMPLES, transition_noise(5, SAMPLES, 3, SHAPE), strict=True))
    some = rng.sample(SAMPLES, size)
    for sample, x, eps in zip(
        some, initial_noise(5, some, SHAPE, same_noise), transition_noise(5, some, 3, SHAPE), strict=True
    ):
        assert torch.equal(x, whole[sample])
        assert torch.equal(eps, step[sample])


def test_every_draw_of_a_run_is_another():
    draws = [initial_noise(0, SAMPLES, SHAPE), initial_noise(1, SAMPLES, SHAPE)]
    draws += [transition_noise(0, SAMPLES, i, SHAPE) for i in range(4)]
    assert len({h for x in draws for h in noise_hash(x)}) == 6 * len(SAMPLES)


def test_same_noise_is_one_draw_per_group_and_transitions_stay_apart():
    hashes = noise_hash(initial_noise(0, SAMPLES, SHAPE, same_noise=True))
    assert len(set(hashes)) == 4 and all(len(set(hashes[4 * g : 4 * g + 4])) == 1 for g in range(4))
    check_distinct(hashes, SAMPLES, same_noise=True)
    assert len(set(noise_hash(transition_noise(0, SAMPLES, 0, SHAPE)))) == len(SAMPLES)


def test_hash_is_of_the_values():
    x = initial_noise(0, SAMPLES, SHAPE)
    assert noise_hash(x) == noise_hash(x.double()) == noise_hash(x.transpose(1, 2).contiguous().transpose(1, 2))
    assert noise_hash(x[3:5]) == noise_hash(x)[3:5]
    changed = x.clone()
    changed[2, 3, 5, 4] += 1e-3  # the last element
    assert [a == b for a, b in zip(noise_hash(x), noise_hash(changed), strict=True)].count(False) == 1


def test_no_samples_is_an_error():
    with pytest.raises(ValueError, match="no samples"):
        initial_noise(0, [], SHAPE)


def test_check_distinct_names_both_samples():
    hashes = noise_hash(initial_noise(0, SAMPLES, SHAPE))
    check_distinct(hashes, SAMPLES)
    reused = list(hashes)
    reused[9] = reused[2]
    with pytest.raises(ValueError, match=r"\('prompt-0', 2\) and \('prompt-2', 1\) share"):
        check_distinct(reused, SAMPLES)
    shared = noise_hash(initial_noise(0, SAMPLES, SHAPE, same_noise=True))
    with pytest.raises(ValueError, match=r"\('prompt-0', 0\) and \('prompt-0', 1\) share"):
        check_distinct(shared, SAMPLES, same_noise=False)
    with pytest.raises(ValueError, match=r"same_noise is set, but samples \('prompt-0', 0\) and \('prompt-0', 1\)"):
        check_distinct(hashes, SAMPLES, same_noise=True)
    across = ["a", "a", "a", "a"]
    with pytest.raises(ValueError, match=r"\('p', 0\) and \('q', 0\) share"):
        check_distinct(across, [("p", 0), ("p", 1), ("q", 0), ("q", 1)], same_noise=True)
    with pytest.raises(ValueError, match="in the batch twice, at positions 0 and 1"):
        check_distinct(["a", "b"], [("p", 0), ("p", 0)])
    with pytest.raises(ValueError, match="1 hashes for 2"):
        check_distinct(["a"], [("p", 0), ("p", 1)])
