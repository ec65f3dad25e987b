"""The sampling loop, one step at a time.

What must hold:
- a row's trajectory does not depend on the rows beside it (it can, of course, if ``predict`` lets it);
- x is carried and recorded in the arithmetic dtype (fp32), before any cast to the model's dtype;
- the sigmas recorded are the sampler's own values, verbatim;
- stopping between two steps and going on elsewhere from ``PartialState`` gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_digen.diffusion.kernels import Transition, check_schedule, transition
from verl_digen.diffusion.windows import StepSelection, recorded_states

Predict = Callable[[Tensor, Tensor, int], Tensor]


@dataclass(frozen=True)
class PartialState:
    """Sampling stopped between two steps; all that another place needs beside the arguments of ``denoise``.

    Attributes:
        x: [B, ...] the latent before transition i, in the arithmetic dtype.
        i: transitions already made.
        latents: per row, the states recorded so far; empty if nothing is recorded.
        step_log_probs: per transition made, [B], or None where no row was SDE.
    """

    x: Tensor
    i: int
    latents: tuple[tuple[Tensor, ...], ...] = ()
    step_log_probs: tuple[Tensor | None, ...] = ()


@dataclass(frozen=True)
class DenoiseResult:
    """What sampling B rows gave. R_b = recorded states and K_b = trained transitions of row b; rows may differ.

    Attributes:
        x_final: [B, ...] in the arithmetic dtype.
        latents: per row [R_b, ...] in the arithmetic dtype; empty without ``record`` or without selections.
        sigmas: per row [R_b], sigmas of these states, verbatim in the dtype given.
        log_probs: per row [K_b], log-probs of the trained transitions.
        starts: per row, K_b indices: transition k goes from latents[b][starts[b][k]] to latents[b][starts[b][k] + 1].
        step_log_probs: [T, B], of every SDE transition; nan where a row was ODE. None without selections.
    """

    x_final: Tensor
    latents: list[Tensor]
    sigmas: list[Tensor]
    log_probs: list[Tensor]
    starts: list[tuple[int, ...]]
    step_log_probs: Tensor | None


class Denoiser:
    """Sampling of B rows that can stop between two steps. See ``denoise`` for the arguments.

    ``step()`` makes one transition and returns its index; ``state()`` is what to hand over; ``result()`` ends.
    """

    def __init__(
        self,
        predict: Predict,
        x_init: Tensor | None,
        sigmas: Tensor,
        kind: str = "ode",
        eta: float = 0.0,
        selections: Sequence[StepSelection] | None = None,
        noise_fn: Callable[[int], Tensor] | None = None,
        dtype: torch.dtype = torch.float32,
        record: bool = True,
        start: PartialState | None = None,
    ) -> None:
        if (x_init is None) == (start is None):
            raise ValueError("denoise needs exactly one of x_init and start")
        self.predict, self.kind, self.eta, self.noise_fn, self.dtype = predict, kind, eta, noise_fn, dtype
        x = x_init if start is None else start.x
        self.i = 0 if start is None else start.i
        self.x = x.to(dtype)
        self.num_steps = len(sigmas) - 1
        self.selections = None if selections is None else list(selections)
        self._check(sigmas)
        self.sigmas = sigmas.to(x.device)
        self._layout = [recorded_states(s) for s in self.selections] if self.selections and record else []
        # [T, B]: built once, so that the loop copies nothing to the device
        rows = [[i in s.sde_steps for s in self.selections or ()] for i in range(self.num_steps)]
        self._any_sde, self._all_sde = [any(r) for r in rows], [any(r) and all(r) for r in rows]
        self._is_sde = torch.tensor(rows, dtype=torch.bool, device=x.device)
        self._latents: list[list[Tensor]] = [[] for _ in self._layout]
        self._step_log_probs: list[Tensor | None] = []
        if start is None:
            self._record()
        else:
            self._resume(start)

    @property
    def done(self) -> bool:
        return self.i == self.num_steps

    @torch.no_grad()
    def step(self) -> int:
        """Make transition i of all rows; returns i."""
        if self.done:
            raise ValueError(f"all {self.num_steps} steps are made")
        i = self.i
        batch = self.x.shape[0]
        sigma, sigma_next = (self.sigmas[s].to(self.dtype).expand(batch) for s in (i, i + 1))
        v = self.predict(self.x, sigma, i)
        moved = self._move(v, sigma, sigma_next, i)
        self._step_log_probs.append(moved.log_prob)
        self.x = moved.x_next
        self.i = i + 1
        self._record()
        return i

    def state(self) -> PartialState:
        """The state between two steps. Shares its tensors with this object, which never writes into them."""
        return PartialState(self.x, self.i, tuple(tuple(row) for row in self._latents), tuple(self._step_log_probs))

    def result(self) -> DenoiseResult:
        """The trajectories.

        Raises:
            ValueError: steps are still to be made.
        """
        if not self.done:
            raise ValueError(f"only {self.i} of {self.num_steps} steps are made")
        log_probs = None
        if self.selections is not None:
            absent = torch.full(self.x.shape[:1], torch.nan, dtype=self.dtype, device=self.x.device)
            log_probs = torch.stack([absent if lp is None else lp for lp in self._step_log_probs])
        recorded = list(enumerate(self._layout))
        return DenoiseResult(
            x_final=self.x,
            latents=[torch.stack(row) for row in self._latents],
            sigmas=[self.sigmas[list(states)] for _, (states, _) in recorded],
            log_probs=[log_probs[list(self.selections[b].trained_steps), b] for b, _ in recorded],
            starts=[starts for _, (_, starts) in recorded],
            step_log_probs=log_probs,
        )

    def _move(self, v: Tensor, sigma: Tensor, sigma_next: Tensor, i: int) -> Transition:
        """Rows that are SDE at step i take the kernel's kind, the others ``ode``."""
        if not self._any_sde[i]:
            return transition("ode", self.x, v, sigma, sigma_next, 0.0, dtype=self.dtype)
        noise = self.noise_fn(i)
        sde = transition(self.kind, self.x, v, sigma, sigma_next, self.eta, noise=noise, dtype=self.dtype)
        if self._all_sde[i]:
            return sde
        ode = transition("ode", self.x, v, sigma, sigma_next, 0.0, dtype=self.dtype)
        rows = self._is_sde[i]
        wide = rows.reshape(-1, *([1] * (self.x.dim() - 1)))
        return Transition(
            torch.where(wide, sde.x_next, ode.x_next),
            torch.where(wide, sde.mean, ode.mean),
            torch.where(rows, sde.std, ode.std),
            torch.where(rows, sde.log_prob, torch.nan),
        )

    def _record(self) -> None:
        for row, (states, _) in enumerate(self._layout):
            if self.i in states:
                # A view would keep the latents of the whole batch alive.
                self._latents[row].append(self.x[row].clone())

    def _resume(self, start: PartialState) -> None:
        if not 0 <= start.i <= self.num_steps:
            raise ValueError(f"start.i = {start.i} is outside the {self.num_steps} steps")
        if self.selections is not None and len(start.step_log_probs) != start.i:
            raise ValueError(f"start has {len(start.step_log_probs)} steps of log-probs, but {start.i} steps are made")
        self._step_log_probs = list(start.step_log_probs) or [None] * start.i
        due = [sum(s <= start.i for s in states) for states, _ in self._layout]
        have = [len(row) for row in start.latents] or [0] * len(due)
        if start.x.dtype != self.dtype:
            raise ValueError(f"start.x is {start.x.dtype}, the run is in {self.dtype}: a cast would change its bits")
        if self._layout and have != due:
            raise ValueError(f"start at step {start.i} carries {have} recorded states per row, {due} are due")
        if start.latents and self._layout:
            self._latents = [list(row) for row in start.latents]

    def _check(self, sigmas: Tensor) -> None:
        selections = self.selections
        if selections is None:
            check_schedule("ode", sigmas, 0.0)
            return
        if self.kind == "ode":
            raise ValueError("kind 'ode' draws no noise: pass no selections, or a stochastic kind")
        if len(selections) != self.x.shape[0]:
            raise ValueError(f"{len(selections)} selections for {self.x.shape[0]} rows")
        for row, s in enumerate(selections):
            if s.num_steps != self.num_steps:
                raise ValueError(
                    f"selection of row {row} is for {s.num_steps} steps, the schedule has {self.num_steps}"
                )
        if self.noise_fn is None:
            raise ValueError(f"kind {self.kind!r} with selections needs noise_fn")
        drawn = {i for s in selections for i in s.sde_steps}
        trained = {i for s in selections for i in s.trained_steps}
        check_schedule(self.kind, sigmas, self.eta, sde_steps=drawn, trained_steps=trained)


def denoise(
    predict: Predict,
    x_init: Tensor | None,
    sigmas: Tensor,
    kind: str = "ode",
    eta: float = 0.0,
    selections: Sequence[StepSelection] | None = None,
    noise_fn: Callable[[int], Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    record: bool = True,
    start: PartialState | None = None,
) -> Generator[int, None, DenoiseResult]:
    """Denoise B rows; a generator that yields the index i after each transition i and returns the result.

    Without selections every step is ODE and nothing is recorded: that is the sampling of validation, whatever ``kind``.
    Nothing runs under autograd, and gradient mode is not changed between the steps. Use ``Denoiser`` to hand a
    half-made trajectory over.

    Args:
        predict: (x [B, ...] in ``dtype``, sigma [B] in ``dtype``, i) -> velocity [B, ...] (noise - data), any dtype.
        x_init: [B, ...]; None with ``start``.
        sigmas: [T + 1], the same for all rows, the pipeline scheduler's own values; read once on the host for checks.
        kind: kernel of the SDE steps.
        eta: noise level of the SDE steps.
        selections: one per row; rows of different groups may differ. None: all steps are ODE.
        noise_fn: i -> [B, ...] standard normal of the rows for transition i; called only if some row is SDE there.
        dtype: arithmetic dtype.
        record: keep latents and log-probs of the trained transitions.
        start: go on from here; the other arguments must be those of the run that was stopped.

    Raises:
        ValueError: at the first ``next``: anything ``check_schedule`` refuses, or arguments that disagree.
    """
    run = Denoiser(predict, x_init, sigmas, kind, eta, selections, noise_fn, dtype, record, start)
    while not run.done:
        yield run.step()
    return run.result()


def run_to_end(steps: Generator[int, None, DenoiseResult]) -> DenoiseResult:
    """Run what is left of ``denoise(...)`` and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value
