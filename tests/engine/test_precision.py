"""The Trainer and a replica compute with the same dtypes and constants, whatever dtype each has loaded in (I11)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.engine.harness import (
    GROUPS,
    Options,
    accumulate,
    build_engine,
    build_sampler,
    fragment,
    open_transaction,
    rule,
    to_rows,
)
from verl_digen.engine.diffusers_fsdp import DiffusersFSDPEngine
from verl_digen.models.precision import computed_in, constants, fp32_modules, settle
from verl_digen.sync.checksum import computed_with

CLIP = 1e-3  # of the digits recipe


@pytest.mark.parametrize("model", [{}, {"lora_rank": 2}], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_both_sides_compute_the_same(dtype, model):
    options = Options(dtype=dtype, model=model)
    engine, sampler = build_engine(options), build_sampler(options)
    sampler.load_weights(engine.get_per_tensor_param()[0], 0)
    assert computed_with(engine.computed, constants(engine.module)) == sampler.computed()
    assert {parameter.dtype for parameter in engine.trainable_parameters()} == {engine.master_dtype}
    rows = []
    for group in GROUPS:  # the batch of a tile of one sample's two transitions, which share their prompt
        part = fragment(group.samples)
        rows += to_rows(sampler.run(part), part.samples)
    transaction = open_transaction(engine, rule())
    accumulate(transaction, rows, 2, last=True)
    assert transaction.commit(8)["log_prob_gap_max"] <= CLIP / 10


class Stub(nn.Module):
    """A model as diffusers writes them: one module and one lone parameter kept in fp32, three kinds of constants."""

    _keep_in_fp32_modules = ("norm", "scale")
    _no_split_modules = ("Block",)
    config: dict = {}

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
            self.scale = nn.Parameter(torch.randn(4))

        def forward(self, x):
            y = self.norm(x.float()).to(x.dtype)
            return self.linear(y) * self.scale

    def __init__(self):
        super().__init__()
        self.block = Stub.Block()
        self.register_buffer("saved", torch.linspace(0, 1, 4))
        self.register_buffer("made", torch.linspace(0, 1, 7)[1:5] ** 3, persistent=False)
        self.table = torch.polar(torch.ones(4, dtype=torch.float32), torch.linspace(0, 1, 4, dtype=torch.float32))

    @classmethod
    def from_config(cls, config):
        return cls()

    @classmethod
    def loaded(cls, dtype: torch.dtype) -> Stub:
        """As ``from_pretrained`` does: built under the dtype, then files cast to it, but for what is kept."""
        torch.manual_seed(0)
        files = cls().state_dict()
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            model = cls()
        finally:
            torch.set_default_dtype(before)
        kept = set(cls._keep_in_fp32_modules)
        for name, value in files.items():
            owner, _, attribute = name.rpartition(".")
            cast = value.float() if kept & set(name.split(".")) else value.to(dtype)
            parameter = attribute in model.get_submodule(owner)._parameters
            setattr(model.get_submodule(owner), attribute, nn.Parameter(cast) if parameter else cast)
        return model

    def forward(self, x):
        y = self.block(x + self.saved + self.made)
        return y + self.table.real.to(y.dtype)


def test_modules_kept_in_fp32_and_every_kind_of_constant_agree():
    """A wide Trainer under FSDP2 predicts bit for bit what a bf16 replica predicts."""
    replica, trainer = Stub.loaded(torch.bfloat16), Stub.loaded(torch.float32)
    assert list(fp32_modules(trainer)) == ["block.norm"]
    loose = {name: value.clone() for name, value in constants(trainer)}
    settle(replica, torch.bfloat16, parameters=True)
    settle(trainer, torch.bfloat16, parameters=False)
    kept = dict(constants(trainer))
    assert loose["made"].dtype == torch.float32 and kept["made"].dtype == kept["saved"].dtype == torch.bfloat16
    assert kept["table"].dtype == torch.complex64

    engine = DiffusersFSDPEngine.__new__(DiffusersFSDPEngine)
    engine.compute_dtype, engine.master_dtype = torch.bfloat16, torch.float32
    engine.engine_config = build_engine(Options()).engine_config
    engine.device_mesh = torch.distributed.init_device_mesh("cpu", (1,))
    engine.module = engine._wrap(trainer)
    dtypes = {name: p.dtype for name, p in replica.named_parameters()}
    assert engine._computed() == dtypes == computed_in(replica, torch.bfloat16)
    assert dtypes["block.norm.weight"] == torch.float32 and dtypes["block.scale"] == torch.bfloat16
    assert computed_with(dtypes, constants(engine.module)) == computed_with(dtypes, constants(replica))

    x = torch.randn(3, 4).to(torch.bfloat16)
    assert torch.equal(engine.module(x), replica(x))
    engine.module(x).float().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.full_tensor().abs().sum() > 0 for p in trainer.parameters())
