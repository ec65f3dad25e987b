"""Advantages against scalar loops in float64, and the cases that must be exactly 0 or an error."""

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_digen.diffusion.advantages import combine_rewards, group_advantages, select_best_of_n


def mean_std(values, ddof):
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - ddof))


def reference(rewards, uids, norm, eps, ddof):
    out = []
    for r, uid in zip(rewards, uids, strict=True):
        group = [x for x, u in zip(rewards, uids, strict=True) if u == uid]
        if len(group) == 1:
            out.append(0.0)
            continue
        mean, std = mean_std(group, ddof)
        scale = {"none": 1.0, "group": std + eps, "global": mean_std(rewards, ddof)[1] + eps}[norm]
        out.append((r - mean) / scale)
    return out


BATCHES = st.lists(
    st.tuples(st.sampled_from("abcd"), st.floats(-10, 10).map(lambda x: round(x, 3))), min_size=1, max_size=16
)


@given(BATCHES, st.sampled_from(["group", "global", "none"]), st.sampled_from([0, 1]), st.sampled_from([1e-4, 1e-2]))
def test_matches_the_scalar_reference(batch, norm, ddof, eps):
    uids, rewards = [u for u, _ in batch], [r for _, r in batch]
    adv, metrics = group_advantages(torch.tensor(rewards, dtype=torch.float64), uids, norm=norm, eps=eps, ddof=ddof)
    assert adv.dtype == torch.float64
    assert adv.tolist() == pytest.approx(reference(rewards, uids, norm, eps, ddof), rel=1e-9, abs=1e-9)
    assert metrics["reward_mean"] == pytest.approx(sum(rewards) / len(rewards), abs=1e-12)
    assert metrics["reward_std"] == pytest.approx(mean_std(rewards, ddof)[1] if len(rewards) > 1 else 0.0, abs=1e-9)
    assert (metrics["reward_min"], metrics["reward_max"]) == (min(rewards), max(rewards))
    flat = sum(len({r for u, r in batch if u == uid}) == 1 for uid in set(uids))
    assert metrics["zero_std_ratio"] == flat / len(set(uids))


@given(BATCHES, st.randoms(use_true_random=False), st.sampled_from(["group", "global", "none"]))
def test_order_of_arrival_does_not_change_a_bit(batch, rng: random.Random, norm):
    order = list(range(len(batch)))
    rng.shuffle(order)
    rewards = torch.tensor([r for _, r in batch], dtype=torch.float64)  # sums of fp32 numbers would be exact anyway
    straight, _ = group_advantages(rewards, [u for u, _ in batch], norm=norm)
    shuffled, _ = group_advantages(rewards[order], [batch[k][0] for k in order], norm=norm)
    assert torch.equal(shuffled, straight[order])


@pytest.mark.parametrize(("ddof", "largest"), [(1, 1.162), (0, 1.342)])
def test_rewards_0_to_3(ddof, largest):
    adv, _ = group_advantages(torch.tensor([0, 1, 2, 3]), ["a"] * 4, ddof=ddof)
    assert adv.dtype == torch.float32 and adv.abs().max().item() == pytest.approx(largest, abs=5e-4)


def test_default_is_torch_std():
    rewards = torch.rand(7)
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    torch.testing.assert_close(group_advantages(rewards, ["a"] * 7)[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("norm", ["group", "global", "none"])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7, 1e9 + 0.1])
def test_equal_rewards_and_singletons_give_exactly_0(norm, value):
    """The rounded mean of equal numbers may differ from them: 1e-17 / (0 + 1e-4) is not 0."""
    uids = ["a"] * 3 + ["b"] + ["c"] * 2
    rewards = torch.tensor([value] * 3 + [0.2, 0.0, 1.0], dtype=torch.float64)
    adv, metrics = group_advantages(rewards, uids, norm=norm)
    assert adv[:4].tolist() == [0.0] * 4 and (adv[4:] != 0).all()
    assert metrics["zero_std_ratio"] == 2 / 3 and metrics["num_singletons"] == 1 and metrics["num_groups"] == 3


def test_global_can_be_made_from_mean_centred_pieces():
    """Accumulate with ``none``, multiply once by 1 / (std + eps) of the whole logical batch."""
    rewards = torch.rand(8, dtype=torch.float64)
    uids = [f"g{k // 2}" for k in range(8)]
    whole, metrics = group_advantages(rewards, uids, norm="global")
    pieces = [group_advantages(rewards[k : k + 2], uids[k : k + 2], norm="none")[0] for k in range(0, 8, 2)]
    torch.testing.assert_close(torch.cat(pieces) / (metrics["reward_std"] + 1e-4), whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_named(bad):
    rewards = torch.tensor([0.0, 1.0, bad, 0.5])
    with pytest.raises(ValueError, match=r"reward of group 'b' at position 2 of the batch is -?(nan|inf)"):
        group_advantages(rewards, ["a", "a", "b", "b"])
    with pytest.raises(ValueError, match="reward 'ocr' of group 'b' at position 2"):
        combine_rewards({"ocr": rewards}, {"ocr": 1.0}, uids=["a", "a", "b", "b"])
    with pytest.raises(ValueError, match="value of group 'b' at position 2"):
        select_best_of_n(rewards, ["a", "a", "b", "b"], 2)


def test_bad_arguments_are_refused():
    r = torch.zeros(2)
    for kwargs, message in [
        ({"norm": "batch"}, "unknown advantage norm 'batch'; available: group, global, none"),
        ({"ddof": 2}, "ddof 2"),
        ({"eps": 0.0}, "eps 0.0"),
    ]:
        with pytest.raises(ValueError, match=message):
            group_advantages(r, ["a", "a"], **kwargs)
    with pytest.raises(ValueError, match=r"\(2,\) must be \[1\]"):
        group_advantages(r, ["a"])
    with pytest.raises(ValueError, match=r"\(2, 1\)"):
        group_advantages(r[:, None], ["a", "a"])
    with pytest.raises(ValueError, match="no rewards"):
        group_advantages(torch.zeros(0), [])


NAMED = {"ocr": torch.tensor([0.0, 1.0, 0.5, 0.5]), "size": torch.tensor([1000.0, 3000.0, 1000.0, 2000.0])}
UIDS = ["a", "a", "b", "b"]


def test_weighted_sum_of_rewards():
    total = combine_rewards(NAMED, {"size": 0.001, "ocr": 2.0}, uids=UIDS)
    assert total.tolist() == pytest.approx([1.0, 5.0, 2.0, 3.0]) and total.dtype == torch.float32
    assert torch.equal(total, combine_rewards(dict(reversed(NAMED.items())), {"ocr": 2.0, "size": 0.001}, uids=UIDS))


def test_normalised_sum_takes_each_reward_in_its_own_group_scale():
    total = combine_rewards(NAMED, {"ocr": 2.0, "size": 1.0}, "normalised_sum", UIDS)
    a = [2.0 * 0.5 / (math.sqrt(0.5) + 1e-4), 1000.0 / (math.sqrt(2) * 1000 + 1e-4)]
    b = 500 / (math.sqrt(0.5) * 1000 + 1e-4)  # the ocr rewards of group b are equal: exactly 0
    assert total.tolist() == pytest.approx([-sum(a), sum(a), -b, b], rel=1e-6)


def test_combine_rewards_refuses():
    for args, message in [
        ((NAMED, {"ocr": 1.0}), r"\['ocr', 'size'\] and weights \['ocr'\]"),
        ((NAMED, {"ocr": 1.0, "sizes": 1.0}), "same names"),
        (({}, {}), "at least one"),
        ((NAMED, {"ocr": math.nan, "size": 1.0}), "weight of reward 'ocr' is nan"),
    ]:
        with pytest.raises(ValueError, match=message):
            combine_rewards(*args, uids=UIDS)
    with pytest.raises(ValueError, match="available: weighted_sum, normalised_sum"):
        combine_rewards(NAMED, {"ocr": 1.0, "size": 1.0}, "product", UIDS)
    with pytest.raises(ValueError, match="needs the uids"):
        combine_rewards(NAMED, {"ocr": 1.0, "size": 1.0})


def test_best_of_n_keeps_top_and_bottom():
    values = torch.tensor([3.0, 9.0, 1.0, 4.0, 0.0, 2.0, 1.5, 5.0, 7.0])
    uids = ["a", "b", "a", "a", "b", "a", "a", "b", "b"]
    mask = select_best_of_n(values, uids, 2)
    assert values[mask].tolist() == [9.0, 1.0, 4.0, 0.0]
    assert select_best_of_n(values, uids, 4).sum() == 8


@given(st.lists(st.integers(0, 3), min_size=4, max_size=12), st.sampled_from([2, 4]))
def test_best_of_n_keeps_exactly_k_also_with_ties(values, k):
    mask = select_best_of_n(torch.tensor(values), ["a"] * len(values), k)
    kept, ranked = sorted(torch.tensor(values)[mask].tolist()), sorted(values)
    assert kept == ranked[: k // 2] + ranked[-k // 2 :]


def test_best_of_n_refuses():
    for k in (0, 1, 3):
        with pytest.raises(ValueError, match=f"got {k}"):
            select_best_of_n(torch.zeros(4), UIDS, k)
    with pytest.raises(ValueError, match="group 'a' has 2 samples, fewer than k = 4"):
        select_best_of_n(torch.zeros(4), UIDS, 4)
