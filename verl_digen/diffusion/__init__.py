"""The diffusion core: transition kernels, keyed noise, step selection, the sampling loop, advantages, losses.

What: the mathematics of reinforcement learning on flow-matching models, as pure functions of tensors. Imports torch and
the standard library only.

Why: rollout, Trainer, helper and tests call the same functions, so a log-prob scored in training has the bits of the
one drawn in sampling, and the first ratio is exactly 1.

How::

    x0 = initial_noise(seed, samples, shape)                      # keyed by (seed, uid, j)
    steps = select_steps("window", T, key=sample_key(seed, uid, 0, "window"), window_size=2)
    result = run_to_end(denoise(predict, x0, sigmas, "sde", 0.7, [steps] * B, noise_fn))
    adv, metrics = group_advantages(rewards, uids)
    t = transition("sde", x, v, sigma, sigma_next, 0.7, x_next=x_next)    # cells: samples x transitions, flattened
    loss, sums = compute_loss("flow_grpo", {"log_prob": t.log_prob, "advantage": adv_cells}, FlowGRPOConfig(),
                              planned_cells=planned)

Gotchas:
- A log-prob is a mean over the latent elements, not a sum: clip ranges are 1e-5...1e-3. A range does not carry over
  between transition kinds (``cps`` has no 1 / (2 s^2)).
- Keep latents in fp32: stored in bf16, the first ratio is off by up to 6e-3 at low sigma.
- Values of a schedule are checked once, by ``check_schedule``; the hot path looks at shapes only.
- ``std`` is s*sqrt(delta) for ``sde`` and ``dance`` but s for ``cps``.
- torch's CPU generator ignores the high half of a 64-bit seed: use ``noise.draw``, never seed one with a key.
- ``planned_cells`` counts the whole logical batch over all ranks, never the fragment at hand.
"""

from verl_digen.diffusion.advantages import combine_rewards, group_advantages, select_best_of_n
from verl_digen.diffusion.denoise import Denoiser, DenoiseResult, PartialState, denoise, run_to_end
from verl_digen.diffusion.kernels import (
    KINDS,
    Transition,
    check_schedule,
    kl_to_reference,
    row_mean,
    transition,
    velocity_to_reference,
)
from verl_digen.diffusion.losses import (
    FlowGRPOConfig,
    Loss,
    compute_loss,
    get_loss,
    log_prob_gap,
    merge_metrics,
    register_loss,
    summarise_metrics,
)
from verl_digen.diffusion.noise import (
    check_distinct,
    draw,
    initial_noise,
    noise_hash,
    sample_key,
    transition_noise,
)
from verl_digen.diffusion.windows import StepSelection, check_selection, recorded_states, select_steps

__all__ = [
    "KINDS",
    "DenoiseResult",
    "Denoiser",
    "FlowGRPOConfig",
    "Loss",
    "PartialState",
    "StepSelection",
    "Transition",
    "check_distinct",
    "check_schedule",
    "check_selection",
    "combine_rewards",
    "compute_loss",
    "denoise",
    "draw",
    "get_loss",
    "group_advantages",
    "initial_noise",
    "kl_to_reference",
    "log_prob_gap",
    "merge_metrics",
    "noise_hash",
    "recorded_states",
    "register_loss",
    "row_mean",
    "run_to_end",
    "sample_key",
    "select_best_of_n",
    "select_steps",
    "summarise_metrics",
    "transition",
    "transition_noise",
    "velocity_to_reference",
]
