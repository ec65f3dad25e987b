"""The bare loop does the work that the recipe's plan says, and its gradient is the project's own.

It is written without any of the project's sampling and training code, so the comparison checks both. Not covered: that
the two take equally long.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from verl_digen.bench.floor import FloorLoop, run_floor
from verl_digen.bench.workload import FloorSpec, compose_recipe, floor_spec, prepare
from verl_digen.config.plan import resolve_plan
from verl_digen.shipped import shipped

SMALL = (
    "actor_rollout_ref.rollout.n=3",
    "data.train_batch_size=4",
    "trainer.v1.digen.sampling.num_steps=4",
    "trainer.v1.digen.threads.trainer=1",
    "trainer.v1.digen.threads.rollout=1",
)
WINDOW = (
    "trainer.v1.digen.sampling.selection.kind=window",
    "trainer.v1.digen.sampling.selection.window_size=2",
)


KL = ("actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_coef=0.5")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def compose(data):
    return lambda *overrides: compose_recipe(shipped("recipes"), (f"recipe.digits_dir={data}", *SMALL, *overrides))


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_spec_is_the_recipe(compose):
    spec = floor_spec(compose(), steps=3)
    assert (spec.n, spec.num_steps, spec.threads) == (3, 4, 1)
    assert (spec.eta, spec.clip_low, spec.lr, spec.weight_decay, spec.clip_grad) == (0.7, 1e-3, 6e-4, 1e-2, 1.0)
    assert spec.kl_beta == 0.04
    assert floor_spec(compose("actor_rollout_ref.actor.use_kl_loss=false"), steps=1).kl_beta == 0.0
    assert [len(step) for step in spec.prompts] == [4, 4, 4]
    assert spec.trained == [[[0, 1, 2]] * 4] * 3
    for prompts, digits in zip(spec.prompts, spec.digits, strict=True):
        words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
        assert all(words[digit] in prompt for prompt, digit in zip(prompts, digits, strict=True))


@pytest.mark.parametrize("overrides", [KL[:1], (*WINDOW, f"{KL[0][:-4]}false")], ids=["all, KL", "window, no KL"])
def test_a_step_has_the_planned_cells(compose, overrides):
    config = compose(*overrides)
    plan, spec = resolve_plan(config), floor_spec(config, steps=1)
    loop = FloorLoop(spec)
    result = loop.step(0)
    assert loop.backward_cells == plan.cells_per_batch
    trained = plan.cells_per_batch * (2 if plan.with_reference else 1)
    assert loop.forward_cells == plan.samples * spec.num_steps + trained
    assert 0 < result["reward"] < 1 and result["grad_norm"] > 0


def test_work_that_the_floor_does_not_do_is_refused(compose):
    with pytest.raises(ValueError, match=r"lora_rank \(here 4.*sampling.kind|sampling.kind.*lora_rank \(here 4"):
        floor_spec(compose("actor_rollout_ref.model.lora_rank=4", "trainer.v1.digen.sampling.kind=cps"), steps=1)
    with pytest.raises(ValueError, match=r"kl_form \(here velocity"):
        floor_spec(compose(*KL, "trainer.v1.digen.algorithm.kl_form=velocity"), steps=1)


def test_run_floor_changes_the_weights_and_times_each_step(compose):
    spec = floor_spec(compose("actor_rollout_ref.rollout.n=2"), steps=2)
    result = run_floor(spec)
    assert len(result["step_s"]) == len(result["reward"]) == 2
    loop = FloorLoop(spec)
    before = [p.detach().clone() for p in loop.model.parameters()]
    loop.step(0)
    assert any(not torch.equal(a, b) for a, b in zip(before, loop.model.parameters(), strict=True))


class _Engine:
    """What a transaction needs of the engine, around the floor's own transformer, without ranks or FSDP."""

    device, master_dtype, ema = torch.device("cpu"), torch.float64, None
    may_stay_whole = whole = False

    def __init__(self, loop: FloorLoop, model_path: str):
        from verl_digen.models.family import family_for

        self.family = family_for(model_path)(model_path, dtype=torch.float64)
        self.module, self.optimizer, self.reference = loop.model, loop.optimizer, loop.reference

    @contextmanager
    def reference_policy(self):
        yield self.reference

    @contextmanager
    def tile(self, reduce: bool):
        yield

    def begin_tile(self) -> None:
        pass

    def trainable_parameters(self):
        return self.module.parameters()


def _sample_rows(spec: FloorSpec, rollout, advantages):
    """The floor's rollout as rows that the Trainer reads: only the states around trained transitions."""
    from verl_digen.diffusion.windows import StepSelection, recorded_states
    from verl_digen.engine.tiles import SampleRow

    sigmas = torch.linspace(1, 0, spec.num_steps + 1)
    for b in range(len(advantages)):
        steps = tuple(rollout.trained[b].tolist())
        states, starts = recorded_states(StepSelection(spec.num_steps, steps, steps))
        yield SampleRow(
            uid=f"g{b // spec.n}",
            j=b % spec.n,
            latents=rollout.latents[list(states), b],
            sigmas=sigmas[list(states)],
            starts=starts,
            log_probs=rollout.log_probs[list(steps), b],
            advantage=float(advantages[b]),
            cond={"prompt_embeds": rollout.embeds[b], "pooled_prompt_embeds": rollout.pooled[b]},
        )


@pytest.fixture
def one_rank(tmp_path):
    """A process group of this process alone, which transactions count in."""
    import torch.distributed as dist

    assert not dist.is_initialized(), "another test left a process group"
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("overrides", [KL, (*WINDOW, f"{KL[0][:-4]}false")], ids=["all, KL", "window, no KL"])
def test_the_gradient_is_that_of_a_transaction(compose, one_rank, overrides):
    """Same trajectories and advantages: gradients of the two writings agree to 1e-9 in float64."""
    from verl_digen.diffusion.losses import FlowGRPOConfig
    from verl_digen.engine.tiles import cells_of_rank
    from verl_digen.engine.transaction import StepRule, Transaction
    from verl_digen.models.family import Guidance

    spec = floor_spec(compose(*overrides), steps=1)
    loop = FloorLoop(spec, dtype=torch.float64)
    with torch.no_grad():  # as after some steps: the KL and its gradient are not 0
        for parameter in loop.model.parameters():
            parameter.mul_(1.01)
    rollout = loop.sample(spec.prompts[0], spec.trained[0])
    advantages = loop.advantages(loop.rewards(rollout.latents[-1], spec.digits[0]))
    assert advantages.abs().max() > 0.1
    loop.accumulate(rollout, advantages)
    own = torch.cat([p.grad.flatten() for p in loop.model.parameters() if p.grad is not None])

    rule = StepRule(
        kind="sde",
        eta=spec.eta,
        guidance=Guidance(),
        loss="flow_grpo",
        loss_config=FlowGRPOConfig(
            clip_low=spec.clip_low, clip_high=spec.clip_high, adv_max=spec.adv_max, kl_beta=spec.kl_beta
        ),
        tsp=False,
        reduce="transaction",
        num_steps=spec.num_steps,
    )
    rows = list(_sample_rows(spec, rollout, advantages))
    transitions = len(rows[0].starts)
    cells = len(rows) * transitions
    transaction = Transaction(_Engine(loop, spec.model), rule, planned_cells=cells, on_policy=True)
    tiles = cells_of_rank(len(rows), transitions, rank=0, ranks=1, max_cells=cells, tsp=False)
    transaction.accumulate(rows, tiles, idle_row=rows[0], last=True)
    theirs = torch.cat([p.grad.flatten() for p in loop.model.parameters() if p.grad is not None])
    assert own.shape == theirs.shape
    assert float((own - theirs).norm() / theirs.norm()) < 1e-9
