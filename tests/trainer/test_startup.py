"""What the workers say after loading must be what was asked for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from verl_digen.trainer.startup import check_loaded


def loaded(*lora: int, backend: str = "native") -> list[dict]:
    computed = [{"a.weight": "bfloat16", "pos_embed": "float32 0123456789abcdef"}]
    return [{"lora": bound, "attention_backend": backend, "computed": computed} for bound in lora]


def test_equal_workers_pass():
    check_loaded(SimpleNamespace(lora_rank=0), "native", loaded(0, 0))
    check_loaded(SimpleNamespace(lora_rank=4), "native", loaded(12, 12, 12))


@pytest.mark.parametrize("lora", [(12, 0), (12, 10), (0, 0)])
def test_adapters_that_differ_or_are_missing_are_refused(lora):
    with pytest.raises(ValueError, match=r"lora_rank=4: adapter tensors bound by the workers are \[" + str(lora[0])):
        check_loaded(SimpleNamespace(lora_rank=4), "native", loaded(*lora))


def test_another_attention_backend_is_refused():
    mixed = [*loaded(0), *loaded(0, backend="flash")]
    with pytest.raises(ValueError, match=r"attention_backend=native: the workers use \['flash', 'native'\]"):
        check_loaded(SimpleNamespace(lora_rank=0), "native", mixed)


@pytest.mark.parametrize("change", [{"a.weight": "float32"}, {"pos_embed": "float32 0"}, {"extra": "bfloat16"}])
def test_other_dtypes_and_constants_are_refused(change):
    """Of the replica in another process, and of the one in a colocated Trainer rank."""
    one, other = loaded(0, 0)
    (name,) = change
    expected = one["computed"][0].get(name)
    changed = [{**one["computed"][0], **change}]
    with pytest.raises(
        ValueError, match=rf"worker 0 and worker 1 .* 1 of \d \w+ \({name}: {expected} and {change[name]}"
    ):
        check_loaded(SimpleNamespace(lora_rank=0), "native", [one, {**other, "computed": changed}])
    with pytest.raises(ValueError, match=rf"worker 0 and worker 0 .*{name}"):
        check_loaded(SimpleNamespace(lora_rank=0), "native", [{**one, "computed": one["computed"] + changed}])
