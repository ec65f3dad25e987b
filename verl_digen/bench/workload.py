"""The work of the digits recipe in plain numbers, so that a loop without any framework can do the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_digen.shipped import verl_config_folder


@dataclass(frozen=True, kw_only=True)
class FloorSpec:
    """The work, in plain numbers.

    Attributes:
        model: folder in the diffusers layout.
        prompts: of each step, its P prompts.
        digits: of each step, the digit of each prompt.
        trained: of each step, the trained transitions of each prompt's samples: K of the ``num_steps``.
        n: samples per prompt.
        kl_beta: weight of the KL of the transitions to the initial policy; 0 leaves it out.
        threads: torch threads; None leaves torch's default.
    """

    model: str
    prompts: list[list[str]]
    digits: list[list[int]]
    trained: list[list[list[int]]]
    n: int
    num_steps: int
    eta: float
    clip_low: float
    clip_high: float
    adv_max: float
    lr: float
    weight_decay: float
    betas: tuple[float, float]
    clip_grad: float | None
    seed: int
    kl_beta: float = 0.0
    threads: int | None = None


def prepare(folder: Path) -> Path:
    """Model and prompts as ``verl-digen prepare digits`` writes them; returns the folder."""
    from verl_digen.data.digits import write_digits_prompts
    from verl_digen.models.digits import ensure_digits_model

    ensure_digits_model(folder / "model")
    write_digits_prompts(folder)
    return folder


def compose_recipe(recipes: Path, overrides: Sequence[str]):
    """The recipe as ``main_ppo`` composes it. veRL's configuration folder is read without importing veRL."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf, open_dict

    search = f"hydra.searchpath=[file://{verl_config_folder()},pkg://verl_digen.config]"
    with initialize_config_dir(config_dir=str(recipes.resolve()), version_base=None):
        config = compose("digits", overrides=[search, *overrides])
    with open_dict(config):
        OmegaConf.resolve(config)
    return config


def floor_spec(config, steps: int) -> FloorSpec:
    """The work of the first ``steps`` steps of a composed recipe, for the bare loop.

    Raises:
        ValueError: the recipe asks for work that the loop does not do.
    """
    from verl_digen.config.plan import resolve_plan
    from verl_digen.data.prompts import PromptDataset, batch_indices, group_uid

    plan = resolve_plan(config)
    _check_coverage(config, plan)
    dataset = PromptDataset(config.data.train_files)
    shuffle = config.data.get("shuffle", True)
    prompts, digits, trained = [], [], []
    for step in range(1, steps + 1):
        epoch, places = batch_indices(plan.seed, len(dataset), plan.prompts, step, shuffle=shuffle)
        rows = [dataset[index] for _, index in places]
        prompts.append([row["prompt"] for row in rows])
        digits.append([int(row["ground_truth"]) for row in rows])
        owners = [group_uid(plan.seed, epoch, position) for position, _ in places]
        trained.append([_trained_steps(plan, owner, step) for owner in owners])
    optim, sampling = config.actor_rollout_ref.actor.optim, plan.digen.sampling
    return FloorSpec(
        model=str(Path(config.actor_rollout_ref.model.path).resolve()),
        prompts=prompts,
        digits=digits,
        trained=trained,
        n=plan.n,
        num_steps=sampling.num_steps,
        eta=sampling.eta,
        clip_low=plan.clip_low,
        clip_high=plan.clip_high,
        adv_max=plan.digen.algorithm.adv_max,
        lr=optim.lr,
        weight_decay=optim.weight_decay,
        betas=tuple(optim.betas),
        clip_grad=optim.clip_grad,
        seed=plan.seed,
        kl_beta=plan.kl_beta,
        threads=plan.digen.threads.trainer,
    )


def _trained_steps(plan, uid: str, step: int) -> list[int]:
    """Trained transitions of a group, drawn from the same key as in the replicas."""
    from verl_digen.diffusion.noise import sample_key
    from verl_digen.diffusion.windows import select_steps

    options = plan.digen.sampling.selection
    selection = select_steps(
        options.kind,
        plan.digen.sampling.num_steps,
        key=sample_key(plan.seed, uid if options.per == "group" else f"step{step}", 0, "window"),
        window_size=options.window_size,
        window_range=None if options.window_range is None else tuple(options.window_range),
        mode=options.mode,
        training_step=step - 1,
        stride=options.stride,
        iterations=options.iterations,
        fraction=options.fraction,
        transition_kind=plan.digen.sampling.kind,
    )
    return list(selection.trained_steps)


def _check_coverage(config, plan) -> None:
    digen, optim = plan.digen, config.actor_rollout_ref.actor.optim
    needed = {
        "trainer.v1.digen.sampling.kind": (digen.sampling.kind, "sde"),
        "trainer.v1.digen.sampling.guidance_scale": (digen.sampling.guidance_scale, 1.0),
        "trainer.v1.digen.sampling.same_noise": (digen.sampling.same_noise, False),
        "trainer.v1.digen.sampling.selection.kind": (digen.sampling.selection.kind == "fraction", False),
        "trainer.v1.digen.algorithm.norm": (digen.algorithm.norm, "group"),
        "trainer.v1.digen.arithmetic": (digen.arithmetic, "float32"),
        "trainer.v1.digen.ema.enable": (digen.ema.enable, False),
        "trainer.v1.digen.rewards": (sorted(digen.rewards), ["digit_classifier"]),
        "trainer.v1.digen.threads.rollout": (digen.threads.rollout, digen.threads.trainer),
        "actor_rollout_ref.model.lora_rank": (plan.lora_rank, 0),
        "actor_rollout_ref.model.dtype": (config.actor_rollout_ref.model.dtype, "float32"),
        "trainer.v1.digen.algorithm.kl_form": (digen.algorithm.kl_form if plan.kl_beta else "transition", "transition"),
        "actor_rollout_ref.actor.ppo_mini_batch_size, ppo_epochs": (plan.on_policy, True),
        "actor_rollout_ref.actor.policy_loss.loss_mode": (plan.loss, "flow_grpo"),
        "actor_rollout_ref.actor.optim.optimizer": (optim.optimizer, "AdamW"),
    }
    wrong = [
        f"{name} (here {found}, the loop does {wanted})" for name, (found, wanted) in needed.items() if found != wanted
    ]
    if wrong:
        raise ValueError(f"the floor does not do the work of this recipe: {'; '.join(wrong)}. Leave out mode 'floor'")
