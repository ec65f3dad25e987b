"""veRL's reward manager for pictures: sums, reports, and failures that never become a value."""

from __future__ import annotations

import asyncio
import json
import sys
import threading

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl import DataProto

from verl_digen.rewards.manager import DiffusionRewardManager, RewardError


def sample(**changes):
    fields = {
        "prompt": "a handwritten seven",
        "ground_truth": "7",
        "data_source": "digits",
        "uid": "g1-0-3",
        "sample": 5,
        "extra_info": {"index": 1},
        **changes,
    }
    arrays = {key: np.array([value], dtype=object) for key, value in fields.items() if value is not None}
    return DataProto.from_dict(tensors={"pixels": torch.zeros(1, 8, 8, 1, dtype=torch.uint8)}, non_tensors=arrays)


def manager(rewards=None, compute_score=None, **custom):
    config = OmegaConf.create(
        {
            "trainer": {"v1": {"digen": {"rewards": rewards or {}}}},
            "reward": {"custom_reward_function": {"path": None, **custom}},
        }
    )
    return DiffusionRewardManager(config, None, compute_score)


def score(manager, **changes):
    return asyncio.run(manager.run_single(sample(**changes)))


@pytest.fixture
def reward_file(tmp_path):
    file = tmp_path / "my_rewards.py"
    file.write_text(
        "def size(images, prompt, ground_truth, extra, factor=1):\n"
        "    return {'score': factor * images.size, 'acc': 0.5, 'index': extra['index']}\n"
        "async def later(images, prompt, ground_truth, extra):\n"
        "    return float(ground_truth)\n"
    )
    return str(file)


def test_weighted_sum_and_every_single_reward(reward_file):
    rewards = {
        "digit_classifier": {"weight": 2.0},
        "small": {"name": "jpeg_compressibility", "weight": 0.5, "kwargs": {"quality": 50}},
        "size": {"path": reward_file, "kwargs": {"factor": 3}, "weight": 0},
        "later": {"path": reward_file},
    }
    result = score(manager(rewards))
    info = result["reward_extra_info"]
    assert info["reward/size"] == 3 * 64 and info["index"] == 1 and info["reward/later"] == 7.0
    assert info["acc"] in (0.0, 1.0) and info["size/acc"] == 0.5  # the earlier reward keeps the short name
    expected = 2 * info["reward/digit_classifier"] + 0.5 * info["reward/small"] + 7.0
    assert result["reward_score"] == pytest.approx(expected)
    assert info["reward/small"] == -info["jpeg_kb"]


def check_arguments(data_source, solution_image, ground_truth, extra_info, prompt):
    assert (data_source, ground_truth, extra_info, prompt) == ("digits", "7", {"index": 1}, "a handwritten seven")
    assert solution_image.dtype == np.uint8 and solution_image.shape == (8, 8, 1)
    return {"score": 4.0, "note": "x"}


async def check_arguments_async(**arguments):
    return check_arguments(**arguments)["score"]


@pytest.mark.parametrize("function", [check_arguments, check_arguments_async])
@pytest.mark.parametrize(("options", "weight"), [({}, 1), ({"weight": 0.25}, 0.25), ({"weight": 0}, 0)])
def test_custom_reward_function_of_verl(function, options, weight):
    result = score(manager(compute_score=function, path="file.py", name="f", **options))
    assert result["reward_score"] == 4.0 * weight and result["reward_extra_info"]["reward/custom"] == 4.0


@pytest.fixture
def batch_file(tmp_path):
    file = tmp_path / "batches.py"
    file.write_text(
        "def sizes(images, prompts, ground_truths, extras, factor=1):\n"
        "    assert len(images) == len(prompts) == len(ground_truths) == len(extras)\n"
        "    return [{'score': factor * int(g), 'together': len(images)} for g in ground_truths]\n"
        "async def later(images, prompts, ground_truths, extras):\n"
        "    return [float(g) for g in ground_truths]\n"
        "def few(images, prompts, ground_truths, extras):\n"
        "    return [1.0]\n"
        "def none(images, prompts, ground_truths, extras):\n"
        "    return None\n"
        "def poison(images, prompts, ground_truths, extras):\n"
        "    return [1.0, float('nan')]\n"
    )
    return str(file)


def test_a_batched_reward_gets_the_samples_in_one_call_beside_single_ones(batch_file):
    rewards = {
        "sizes": {"path": batch_file, "batched": True, "kwargs": {"factor": 10}},
        "later": {"path": batch_file, "batched": True, "weight": 0.5},
        "jpeg_compressibility": {"weight": 0},
    }
    data = DataProto.concat([sample(ground_truth=digit, sample=j) for j, digit in enumerate("372")])
    results = asyncio.run(manager(rewards).run_batch(data))
    assert [r["reward_score"] for r in results] == [31.5, 73.5, 21.0]
    assert [r["reward_extra_info"]["together"] for r in results] == [3, 3, 3]
    assert all("reward/jpeg_compressibility" in r["reward_extra_info"] for r in results)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("few", "'few' is batched, but gave 1 results for 2 samples, the first: .*j=0"),
        ("none", "'none' is batched, but gave None for 2 samples"),
        ("poison", r"'poison' gave the score nan for sample \(uid=g1-0-3, j=1\)"),
    ],
)
def test_a_batched_reward_gives_one_finite_score_per_sample(batch_file, name, message):
    data = DataProto.concat([sample(sample=j) for j in range(2)])
    with pytest.raises(RewardError, match=message):
        asyncio.run(manager({name: {"path": batch_file, "batched": True}}).run_batch(data))


def test_verls_default_function_is_not_used_unless_asked_for():
    result = score(manager({"jpeg_compressibility": None}, compute_score=lambda **_: 1 / 0))
    assert "reward/custom" not in result["reward_extra_info"]


def fail(**_):
    raise KeyError("boom")


async def fail_async(**_):
    raise TimeoutError("no answer in 5 s")


def stop(**_):
    raise StopIteration


async def exit_async(**_):
    sys.exit(3)


async def cancel_async(**_):
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        (fail, "KeyError: 'boom'"),
        (fail_async, "TimeoutError: no answer in 5 s"),
        (lambda **_: {"acc": 1.0}, "no 'score'.*it gave acc"),
        (lambda **_: {}, "no 'score'.*it gave nothing"),
        (lambda **_: float("nan"), "score nan"),
        (lambda **_: {"score": np.float32("inf")}, "score .*inf"),
        (lambda **_: None, "score None"),
        (lambda **_: "0.5", "score '0.5'"),
        (lambda **_: np.zeros(2), "score array"),
        (lambda **_: sys.exit("enough"), "SystemExit: enough"),
        (stop, "StopIteration"),
        (exit_async, "SystemExit: 3"),
        (cancel_async, "CancelledError"),
    ],
)
def test_a_failure_is_an_error_that_names_reward_and_sample(function, cause):
    failing = manager({"jpeg_compressibility": {}}, compute_score=function, path="file.py", name="f")
    with pytest.raises(RewardError, match=cause) as error:
        score(failing)
    for part in ("'custom'", "uid=g1-0-3", "j=5", "'a handwritten seven'"):
        assert part in str(error.value)


def test_numbers_of_numpy_and_torch_are_scores():
    for value in (np.float32(0.5), torch.tensor(0.5), np.array(0.5), 0.5):
        result = score(manager(compute_score=lambda value=value, **_: value, path="file.py", name="f"))
        assert result["reward_score"] == 0.5 and type(result["reward_score"]) is float


def test_what_a_reward_reports_is_of_pythons_types():
    reported = {
        "score": 1.0,
        "acc": np.float32(1.0),
        "right": np.bool_(True),
        "count": np.int64(3),
        "margin": torch.tensor(0.5),
        "logits": np.arange(3),
        "boxes": [np.arange(2), {"label": np.str_("seven")}],
        "text": "seven",
        "nothing": None,
        "raw": b"7",
        4: 4,
    }
    info = score(manager(compute_score=lambda **_: reported, path="file.py", name="f"))["reward_extra_info"]
    expected = {
        "reward/custom": 1.0,
        "acc": 1.0,
        "right": True,
        "count": 3,
        "margin": 0.5,
        "logits": [0, 1, 2],
        "boxes": [[0, 1], {"label": "seven"}],
        "text": "seven",
        "nothing": None,
        "raw": "b'7'",
        "4": 4,
    }
    assert json.loads(json.dumps(info)) == expected
    assert [type(info[name]) for name in ("acc", "right", "count", "margin")] == [float, bool, int, float]


def test_a_key_named_reward_leaves_the_name_to_the_sum():
    result = score(manager(compute_score=lambda **_: {"score": 1.0, "reward": 9.0}, path="file.py", name="f"))
    assert result["reward_score"] == 1.0
    assert result["reward_extra_info"] == {"reward/custom": 1.0, "custom/reward": 9.0}


def test_a_file_that_exits_when_it_is_imported_is_named(tmp_path):
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(ValueError, match="reward 'mine': .*leaves.py calls sys.exit"):
        manager({"mine": {"path": str(tmp_path / "leaves.py")}})


def test_blocking_functions_do_not_block_the_loop():
    """All four are inside the function at the same time, or the barrier breaks."""
    together = threading.Barrier(4, timeout=30)
    slow = manager(compute_score=lambda **_: together.wait() * 0 + 1.0, path="file.py", name="f")

    async def many():
        return await asyncio.gather(*(slow.run_single(sample()) for _ in range(4)))

    assert [result["reward_score"] for result in asyncio.run(many())] == [1.0] * 4


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ({"beauty": {}}, "unknown reward 'beauty'; available: .*digit_classifier"),
        ({"digit_classifier": {"wieght": 1}}, "unknown option.* wieght; known: batched, kwargs, name, path, weight"),
        ({"digit_classifier": {"weight": float("inf")}}, "weight must be a finite number, got inf"),
        ({"digit_classifier": {"weight": "heavy"}}, "weight must be a finite number, got 'heavy'"),
        ({"mine": {"path": "/nowhere/file.py"}}, "reward 'mine': no file /nowhere/file.py"),
        ({"custom": {"name": "digit_classifier"}}, "'custom' is kept for"),
        ({"mine": {"name": float("inf")}}, r"trainer.v1.digen.rewards.mine.name=inf is no text; put it in quotes"),
        ({"mine": {"path": 3}}, r"rewards.mine.path=3 is no text"),
        ({"digit_classifier": {"kwargs": [1]}}, r"rewards.digit_classifier.kwargs=\[1\] is no mapping"),
        ({"digit_classifier": {"batched": 1}}, r"rewards.digit_classifier.batched=1 is no true or false"),
        ({"digit_classifier": 0.5}, r"rewards.digit_classifier=0.5 is no mapping; .*weight"),
        ({}, "no reward is configured"),
    ],
)
def test_wrong_configuration_is_refused_at_construction(rewards, message):
    with pytest.raises(ValueError, match=message):
        manager(rewards)


def test_function_missing_from_a_file(reward_file):
    with pytest.raises(ValueError, match=r"my_rewards.py has no function 'colour'"):
        manager({"colour": {"path": reward_file}})


def test_incomplete_samples_are_refused():
    with pytest.raises(ValueError, match="lacks ground_truth, uid"):
        score(manager({"jpeg_compressibility": {}}), ground_truth=None, uid=None)
    two = DataProto.concat([sample(), sample()])
    with pytest.raises(ValueError, match="scores one sample, got 2"):
        asyncio.run(manager({"jpeg_compressibility": {}}).run_single(two))
