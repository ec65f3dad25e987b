"""Prompt files, and the order in which training meets the prompts."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_digen.data.prompts import PromptDataset, batch_indices, fingerprint, group_uid


def row(prompt="a cat", **changes):
    return {
        "prompt": prompt,
        "data_source": "test",
        "reward_model": {"style": "rule", "ground_truth": "7"},
        "extra_info": {"index": 0},
        **changes,
    }


def write(file, rows):
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file


def test_rows_are_read(tmp_path):
    first = write(tmp_path / "a.parquet", [row("a cat"), row("a dog", extra_info={"index": 5})])
    second = write(tmp_path / "b.parquet", [row("a cow", negative_prompt="blurry")])
    dataset = PromptDataset([first, str(second)])
    assert len(dataset) == 3
    assert dataset[1] == {
        "prompt": "a dog",
        "negative_prompt": None,
        "data_source": "test",
        "reward_model": {"style": "rule", "ground_truth": "7"},
        "ground_truth": "7",
        "extra_info": {"index": 5},
    }
    assert dataset[2]["negative_prompt"] == "blurry"
    with pytest.raises(IndexError):
        dataset[3]


def test_fingerprint_tells_data_sets_apart(tmp_path):
    a = PromptDataset(write(tmp_path / "a.parquet", [row("a cat"), row("a dog")]))
    copy = PromptDataset(write(tmp_path / "copy.parquet", [row("a cat"), row("a dog")]))
    swapped = PromptDataset(write(tmp_path / "swapped.parquet", [row("a dog"), row("a cat")]))
    assert fingerprint(a) == fingerprint(copy) != fingerprint(swapped)


def test_missing_columns_are_all_named(tmp_path):
    file = write(tmp_path / "a.parquet", [{"prompt": "a cat", "extra_info": {"index": 0}}])
    with pytest.raises(
        ValueError, match=r"lacks 2 column\(s\): data_source, reward_model \(it has: prompt, extra_info"
    ):
        PromptDataset(file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": 3}, "row 0: prompt and data_source must be text"),
        ({"reward_model": {"style": "rule"}}, "row 0: reward_model must hold ground_truth"),
        ({"negative_prompt": 1.5}, "row 0: negative_prompt must be text"),
    ],
)
def test_wrong_contents_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        PromptDataset(write(tmp_path / "a.parquet", [row(**changes)]))


def test_unreadable_empty_and_missing_files_are_refused(tmp_path):
    (tmp_path / "text.parquet").write_text("hello")
    for file in (tmp_path / "text.parquet", tmp_path / "absent.parquet"):
        with pytest.raises(ValueError, match=f"cannot read prompt file .*{file.name}"):
            PromptDataset(file)
    table = pa.Table.from_pylist([row()]).slice(0, 0)
    pq.write_table(table, tmp_path / "empty.parquet")
    with pytest.raises(ValueError, match="has 0 rows"):
        PromptDataset(tmp_path / "empty.parquet")
    with pytest.raises(ValueError, match="no prompt file given"):
        PromptDataset([])


sizes = st.integers(1, 40).flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size)))


@given(seed=st.integers(0, 2**63), size_and_batch=sizes, epoch=st.integers(0, 3), shuffle=st.booleans())
def test_an_epoch_meets_each_prompt_at_most_once(seed, size_and_batch, epoch, shuffle):
    size, batch_size = size_and_batch
    per_epoch = size // batch_size
    met = []
    for step in range(epoch * per_epoch + 1, (epoch + 1) * per_epoch + 1):
        in_epoch, batch = batch_indices(seed, size, batch_size, step, shuffle)
        assert in_epoch == epoch and len(batch) == batch_size
        met += batch
    assert [position for position, _ in met] == list(range(per_epoch * batch_size))
    indices = [index for _, index in met]
    assert len(set(indices)) == len(indices) and set(indices) <= set(range(size))
    if not shuffle:
        assert indices == list(range(per_epoch * batch_size))


def test_order_is_a_function_of_seed_and_epoch_only():
    assert batch_indices(3, 40, 10, 7) == batch_indices(3, 40, 10, 7)
    orders = {tuple(index for _, index in batch_indices(seed, 40, 40, step)[1]) for seed in (3, 4) for step in (1, 2)}
    assert len(orders) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 8, 9, 1), "a batch of 9 prompts cannot be drawn from a data set of 8"),
        ((0, 8, 4, 0), "got step 0, batch size 4"),
        ((0, 8, 0, 1), "got step 1, batch size 0"),
    ],
)
def test_impossible_batches_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        batch_indices(*arguments)


def test_group_uids_are_distinct_stable_and_fit_for_keys():
    uids = [group_uid(seed, epoch, position) for seed in (0, 1) for epoch in range(12) for position in range(12)]
    assert len(set(uids)) == len(uids)
    assert not any("_" in uid for uid in uids)
    assert group_uid(7, 2, 31) == group_uid(7, 2, 31)
