"""One rank of the engine with the digits model, a sampler and a few denoised samples, all in this process."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from verl_digen.config.digen import DigenConfig, SamplingConfig
from verl_digen.config.model import DiffusionModelConfig
from verl_digen.diffusion.losses import FlowGRPOConfig
from verl_digen.engine.diffusers_fsdp import DiffusersFSDPEngine
from verl_digen.engine.tiles import SampleRow, cells_of_rank
from verl_digen.engine.transaction import StepRule, Transaction
from verl_digen.models.digits import ASSETS
from verl_digen.models.family import Guidance
from verl_digen.rollout.requests import Fragment, PromptGroup
from verl_digen.rollout.sampler import DenoisedFragment, Sampler

GROUPS = [
    PromptGroup(uid=uid, n=2, prompt=f"a drawing of {word}", negative_prompt="", ground_truth="", data_source="digits")
    for uid, word in (("a", "three"), ("b", "seven"))
]
STEPS = 3  # K = 2 trained transitions, 4 samples: 8 cells


@dataclass
class Options:
    """What the tests vary."""

    dtype: str = "float64"
    model: dict = field(default_factory=dict)
    digen: dict = field(default_factory=dict)
    optim: dict = field(default_factory=dict)
    fsdp: dict = field(default_factory=dict)
    reference: bool = False
    contents: tuple = ("model", "optimizer", "extra")

    @property
    def model_config(self) -> DiffusionModelConfig:
        return DiffusionModelConfig(**{"path": str(ASSETS), "dtype": self.dtype, **self.model})

    @property
    def digen_config(self) -> DigenConfig:
        arithmetic = "float64" if self.dtype == "float64" else "float32"
        return DigenConfig(arithmetic=arithmetic, sampling=SamplingConfig(num_steps=STEPS), **self.digen)


def build_engine(options: Options) -> DiffusersFSDPEngine:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig

    optim = {"lr": 1e-3, "weight_decay": 1e-2, "clip_grad": 1.0, "total_training_steps": 10, **options.optim}
    engine = DiffusersFSDPEngine(
        model_config=options.model_config,
        engine_config=FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False, **options.fsdp),
        optimizer_config=FSDPOptimizerConfig(**optim),
        checkpoint_config=CheckpointConfig(save_contents=list(options.contents)),
    )
    engine.configure(options.digen_config, with_reference=options.reference, seed=0)
    engine.initialize()
    return engine


def build_sampler(options: Options) -> Sampler:
    sampler = Sampler(options.model_config, options.digen_config, seed=0, device=torch.device("cpu"))
    sampler.load()
    return sampler


def fragment(samples=None) -> Fragment:
    return Fragment(
        fragment_id=1,
        groups={g.uid: g for g in GROUPS},
        samples=tuple(samples or [s for g in GROUPS for s in g.samples]),
        version=0,
        training_step=1,
    )


def to_rows(done: DenoisedFragment, samples) -> list[SampleRow]:
    return [
        SampleRow(
            uid=uid,
            j=j,
            latents=done.result.latents[i],
            sigmas=done.result.sigmas[i],
            starts=done.result.starts[i],
            log_probs=done.result.log_probs[i],
            advantage=(1.0, -1.0)[j] * (1 + 0.5 * (uid == "b")),
            cond=done.embeddings[uid][0],
        )
        for i, (uid, j) in enumerate(samples)
    ]


@cache
def initial_rows(dtype: str) -> tuple[SampleRow, ...]:
    """The samples as the initial weights give them, for every test that does not sample itself."""
    sampler = build_sampler(Options(dtype=dtype))
    return tuple(to_rows(sampler.run(fragment()), fragment().samples))


def rule(**changes) -> StepRule:
    loss = {"clip_low": 1e-3, "clip_high": 1e-3} | changes.pop("loss", {})
    base = StepRule(
        kind="sde",
        eta=0.7,
        guidance=Guidance(),
        loss="flow_grpo",
        loss_config=FlowGRPOConfig(**loss),
        tsp=True,
        reduce="transaction",
        num_steps=STEPS,
    )
    return replace(base, **changes)


def open_transaction(engine, step_rule: StepRule, *, cells: int = 8, **options) -> Transaction:
    engine.module.train()
    return Transaction(engine, step_rule, planned_cells=cells, **{"on_policy": True, **options})


def accumulate(
    transaction: Transaction, rows, max_cells: int | None = None, *, idle: int = 0, last: bool = False, rank=0, ranks=1
) -> None:
    """A rank's share of the rows, with ``idle`` empty tiles at the end."""
    rows = list(rows)
    tiles = cells_of_rank(
        len(rows), len(rows[0].starts), rank=rank, ranks=ranks, max_cells=max_cells or 1000, tsp=transaction.rule.tsp
    )
    transaction.accumulate(rows, tiles + [[]] * idle, idle_row=rows[0], last=last)


def gradients(engine) -> dict[str, torch.Tensor]:
    return {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad.clone()
        for name, p in engine.named_trainable()
    }


def snapshot(engine) -> dict[str, torch.Tensor]:
    """Weights, optimizer state, EMA and RNG, as copies."""
    state = {f"model.{name}": p.detach().clone() for name, p in engine.named_trainable()}
    for name, p in engine.named_trainable():
        for key, value in engine.optimizer.state.get(p, {}).items():
            state[f"{key}.{name}"] = torch.as_tensor(value).clone()
    if engine.ema is not None:
        state |= {f"ema.{name}": value.clone() for name, value in engine.ema.average.items()}
    return state | {"rng": torch.get_rng_state()}


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """‖a − b‖ / ‖b‖."""
    assert a.keys() == b.keys()
    return (sum((a[k] - b[k]).square().sum() for k in a) / sum(b[k].square().sum() for k in b)).sqrt().item()


def one_step(engine, step_rule: StepRule, rows, *, on_policy: bool = True) -> dict[str, float]:
    """A whole transaction."""
    transaction = open_transaction(engine, step_rule, on_policy=on_policy)
    accumulate(transaction, rows, last=True)
    return transaction.commit(8)


def files(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file()]
