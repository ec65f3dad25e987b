"""veRL's reward manager for pictures: several weighted rewards per sample, and never a value in place of a failure."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

from verl_digen.config.digen import RewardSpec
from verl_digen.rewards.functions import REWARDS

CUSTOM = "custom"
_OPTION = "trainer.v1.digen.rewards"
_TAKEN = ("reward",)  # the weighted sum has this name in the validation metrics


class RewardError(RuntimeError):
    """A sample could not be judged. The message names the reward, the sample, its prompt and the cause."""


def load_reward(label: str, spec: RewardSpec) -> Callable[..., Any]:
    """The function of an entry of ``trainer.v1.digen.rewards``: ``fn(images, prompt, ground_truth, extra)``, each of
    one sample, or, with ``batched``, of a list of samples.

    Raises:
        ValueError: no such registered function, file, or function in the file.
    """
    return REWARDS.load(label, spec.path, spec.name, spec.kwargs)


@dataclass(frozen=True)
class _Sample:
    """What a reward sees of one sample."""

    images: np.ndarray
    prompt: str
    ground_truth: str
    data_source: str
    extra: dict[str, Any]
    where: str


@dataclass(frozen=True)
class _Reward:
    """``call`` takes a sample, or a list of samples if it is batched."""

    label: str
    weight: float
    call: Callable[[Any], Any]
    is_async: bool
    batched: bool = False


class DiffusionRewardManager(RewardManagerBase):
    """Scores one picture or video by the rewards of ``config.trainer.v1.digen.rewards`` and the custom reward function.

    Args:
        config: veRL's configuration. If ``reward.custom_reward_function.path`` is set, ``compute_score`` is one more
            reward, ``custom``, of weight ``reward.custom_reward_function.weight`` (default 1).
        tokenizer: not used; veRL passes it to every manager.
        compute_score: function or coroutine function, called with the keywords ``data_source``, ``solution_image``
            (uint8), ``ground_truth``, ``extra_info`` and ``prompt``; returns a number or a mapping with ``score``.

    Raises:
        ValueError: an unknown reward, an unknown or unusable option, or no reward at all.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        compute_score: Callable[..., Any] | None,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> None:
        super().__init__(config, tokenizer, compute_score)
        self.rewards = [_configured(label, entry) for label, entry in _entries(config).items()]
        custom = OmegaConf.select(config, "reward.custom_reward_function")
        if custom is not None and custom.get("path"):
            router = {}
            if reward_router_address is not None:
                router = {
                    "reward_router_address": reward_router_address,
                    "reward_model_tokenizer": reward_model_tokenizer,
                }
            weight = custom.get("weight")
            self.rewards.append(_custom(compute_score, 1.0 if weight is None else weight, router))
        if not self.rewards:
            raise ValueError(
                "no reward is configured: set trainer.v1.digen.rewards (for example {digit_classifier: {weight: 1.0}}) "
                "or reward.custom_reward_function.path"
            )

    async def run_single(self, data: Any) -> dict[str, Any]:
        """Score one sample.

        Args:
            data: a ``DataProto`` of one row: ``pixels`` uint8 [1, H, W, C] or [1, F, H, W, C], and in its
                ``non_tensor_batch`` ``prompt``, ``ground_truth``, ``data_source``, ``uid``, ``sample``, ``extra_info``.

        Returns:
            ``reward_score``, the weighted sum, and ``reward_extra_info``: ``reward/<name>`` for every reward
            and what the rewards report beside their score, in types of Python (``<name>/<key>`` where an earlier
            reward has that key, or the key is ``reward``).

        Raises:
            RewardError: a reward raised, or gave no finite ``score``.
        """
        if len(data) != 1:
            raise ValueError(f"run_single scores one sample, got {len(data)}")
        return (await self.run_batch(data))[0]

    async def run_batch(self, data: Any) -> list[dict[str, Any]]:
        """Score the samples of a fragment, a batched reward in one call; see :meth:`run_single`."""
        samples = [_read_sample(data[i]) for i in range(len(data))]
        judged = await asyncio.gather(*(_score_all(reward, samples) for reward in self.rewards))
        return [self._combine(results) for results in zip(*judged, strict=True)]

    def _combine(self, results: Sequence[tuple[float, dict[str, Any]]]) -> dict[str, Any]:
        """The weighted sum and the report of one sample."""
        total, info = 0.0, {}
        for reward, (score, _) in zip(self.rewards, results, strict=True):
            total += reward.weight * score
            info[f"reward/{reward.label}"] = score
        for reward, (_, extras) in zip(self.rewards, results, strict=True):
            for key, value in extras.items():
                name = str(key)
                while name in info or name in _TAKEN:
                    name = f"{reward.label}/{name}"
                info[name] = _plain(value)
        return {"reward_score": total, "reward_extra_info": info}


def _entries(config: Any) -> dict[str, RewardSpec]:
    node = OmegaConf.select(config, _OPTION)
    plain = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else (node or {})
    known = {entry.name for entry in fields(RewardSpec)}
    entries = {}
    for label, options in plain.items():
        if not isinstance(options, dict | None):
            raise ValueError(f"{_OPTION}.{label}={options!r} is no mapping; write for example {{weight: 1.0}}")
        options = {key: value for key, value in (options or {}).items() if value is not None}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ValueError(
                f"reward {label!r}: unknown option(s) {', '.join(unknown)}; known: {', '.join(sorted(known))}"
            )
        if label == CUSTOM:
            raise ValueError("the reward name 'custom' is kept for reward.custom_reward_function; choose another")
        for key, kind, wanted in (
            ("name", str, "text; put it in quotes"),
            ("path", str, "text; put it in quotes"),
            ("kwargs", dict, "mapping"),
            ("batched", bool, "true or false"),
        ):
            if key in options and not isinstance(options[key], kind):
                raise ValueError(f"{_OPTION}.{label}.{key}={options[key]!r} is no {wanted}")
        entries[str(label)] = RewardSpec(**options)
    return entries


def _checked_weight(label: str, weight: Any) -> float:
    if isinstance(weight, bool) or not isinstance(weight, Real) or not math.isfinite(weight):
        raise ValueError(f"reward {label!r}: weight must be a finite number, got {weight!r}")
    return float(weight)


def _configured(label: str, entry: RewardSpec) -> _Reward:
    function = load_reward(label, entry)

    def call(sample: _Sample) -> Any:
        return function(sample.images, sample.prompt, sample.ground_truth, dict(sample.extra))

    def call_batch(samples: Sequence[_Sample]) -> Any:
        return function(
            [sample.images for sample in samples],
            [sample.prompt for sample in samples],
            [sample.ground_truth for sample in samples],
            [dict(sample.extra) for sample in samples],
        )

    weight, is_async = _checked_weight(label, entry.weight), _is_async(function)
    return _Reward(label, weight, call_batch if entry.batched else call, is_async, entry.batched)


def _custom(compute_score: Callable[..., Any] | None, weight: Any, router: dict[str, Any]) -> _Reward:
    if compute_score is None:
        raise ValueError("reward.custom_reward_function.path is set, but no function was loaded from it")

    def call(sample: _Sample) -> Any:
        return compute_score(
            data_source=sample.data_source,
            solution_image=sample.images,
            ground_truth=sample.ground_truth,
            extra_info=dict(sample.extra),
            prompt=sample.prompt,
            **router,
        )

    return _Reward(CUSTOM, _checked_weight(CUSTOM, weight), call, _is_async(compute_score))


def _is_async(function: Callable[..., Any]) -> bool:
    """Whether to await the function's result, rather than to call it in a thread."""
    method = getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__ counts too
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)


def _read_sample(item: Any) -> _Sample:
    fields = item.non_tensor_batch
    missing = [key for key in ("prompt", "ground_truth", "data_source", "uid", "sample") if key not in fields]
    if missing or "pixels" not in item.batch:
        raise ValueError(
            f"a sample to score lacks {', '.join([*missing, *(['pixels'] * ('pixels' not in item.batch))])}"
        )
    images = np.asarray(item.batch["pixels"].cpu())
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise ValueError(f"pixels must be uint8 [H, W, C] or [F, H, W, C], got {images.dtype} {list(images.shape)}")
    where = f"sample (uid={fields['uid']}, j={fields['sample']}), prompt {fields['prompt']!r}"
    extra = dict(fields.get("extra_info") or {})
    return _Sample(images, fields["prompt"], fields["ground_truth"], fields["data_source"], extra, where)


def _failure(reward: _Reward, where: str, error: BaseException) -> RewardError:
    return RewardError(f"reward {reward.label!r} failed for {where}: {type(error).__name__}: {error}")


def _call(reward: _Reward, given: Any, where: str) -> Any:
    """Call the reward, in a thread. ``sys.exit`` and ``StopIteration`` would end or hang the event loop they reach."""
    try:
        return reward.call(given)
    except BaseException as error:  # noqa: BLE001 - whatever a reward raises is reported with its sample
        raise _failure(reward, where, error) from error


async def _answer(reward: _Reward, given: Any, where: str) -> Any:
    """What the reward returns for a sample, or for a list of samples."""
    if not reward.is_async:
        return await asyncio.get_running_loop().run_in_executor(None, _call, reward, given, where)
    try:
        return await reward.call(given)
    except GeneratorExit:  # the coroutine is thrown away
        raise
    except BaseException as error:  # noqa: BLE001 - whatever a reward raises is reported with its sample
        raise _failure(reward, where, error) from error


def _plain(value: Any) -> Any:
    """``value`` in types of Python: scalars of numpy and torch as numbers, their arrays as lists, others as text."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(inner) for inner in value]
    if hasattr(value, "tolist"):  # a scalar gives a number
        return value.tolist()
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


async def _score_all(reward: _Reward, samples: Sequence[_Sample]) -> list[tuple[float, dict[str, Any]]]:
    """Score and extras of every sample; every failure becomes a RewardError that names reward and sample."""
    if reward.batched:
        where = f"{len(samples)} samples, the first: {samples[0].where}"
        answers = await _answer(reward, samples, where)
        if not isinstance(answers, Sequence | np.ndarray) or isinstance(answers, str) or len(answers) != len(samples):
            count = f"{len(answers)} results" if hasattr(answers, "__len__") else repr(answers)
            raise RewardError(f"reward {reward.label!r} is batched, but gave {count} for {where}")
    else:
        answers = await asyncio.gather(*(_answer(reward, sample, sample.where) for sample in samples))
    return [_read_score(reward, sample, answer) for sample, answer in zip(samples, answers, strict=True)]


def _read_score(reward: _Reward, sample: _Sample, result: Any) -> tuple[float, dict[str, Any]]:
    extras = dict(result) if isinstance(result, dict) else {"score": result}
    if "score" not in extras:
        raise RewardError(
            f"reward {reward.label!r} gave no 'score' for {sample.where}: "
            f"it gave {', '.join(map(str, extras)) or 'nothing'}"
        )
    score = extras.pop("score")
    if not _is_finite_number(score):
        raise RewardError(f"reward {reward.label!r} gave the score {score!r} for {sample.where}: not a finite number")
    return float(score), extras


def _is_finite_number(value: Any) -> bool:
    if not isinstance(value, Real | np.ndarray) and not hasattr(value, "item"):
        return False
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError):
        return False
