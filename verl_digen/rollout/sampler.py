"""Denoise a fragment with one copy of the model: used by replicas, and able to stop between two steps.

What must hold: a sample is the same sample wherever and with whomever it is denoised (I1); the transition kernel is the
one that training uses; latents are kept before any cast.
"""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from verl_digen.config.digen import DigenConfig
from verl_digen.config.model import DiffusionModelConfig
from verl_digen.diffusion.denoise import DenoiseResult, denoise, run_to_end
from verl_digen.diffusion.noise import initial_noise, noise_hash, sample_key, transition_noise
from verl_digen.diffusion.windows import StepSelection, select_steps
from verl_digen.models.family import Guidance, family_for, stack_conditions
from verl_digen.models.lora import add_lora
from verl_digen.models.precision import constants, settle
from verl_digen.platform.memory import release_cached
from verl_digen.rollout.requests import Fragment, PromptGroup
from verl_digen.sync.checksum import computed_with, tensors_checksum

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))


@dataclass
class DenoisedFragment:
    """A denoised fragment before scoring.

    Attributes:
        result: trajectories of its samples, in the order of ``fragment.samples``.
        selections: step selection of each sample (empty in validation).
        pixels: uint8 [B, H, W, C] or [B, F, H, W, C].
        noise_hashes: of the initial noise.
        embeddings: uid -> (prompt tensors, negative prompt tensors or None), without batch dimension.
        phases: seconds of ``encode``, ``denoise`` and ``decode``; the device was waited for at the end of each.
    """

    result: DenoiseResult
    selections: list[StepSelection]
    pixels: np.ndarray
    noise_hashes: list[str]
    embeddings: dict[str, tuple[dict, dict | None]]
    phases: dict[str, float] = field(default_factory=dict)


class Sampler:
    """A model that samples.

    Args:
        model: ``actor_rollout_ref.model``.
        digen: ``trainer.v1.digen``.
        seed: run seed; part of every noise key.
        device: where the model lives.
        cache_size: prompt embeddings kept.
    """

    def __init__(
        self, model: DiffusionModelConfig, digen: DigenConfig, *, seed: int, device: torch.device, cache_size: int = 512
    ):
        self.model, self.digen, self.seed, self.device = model, digen, seed, device
        self.arithmetic = getattr(torch, digen.arithmetic)
        self.dtype = getattr(torch, model.dtype)
        self.version: int | None = None
        self._cache: OrderedDict[str, dict] = OrderedDict()
        self._cache_size = cache_size
        self._fits: dict[bool, int] = {}  # samples of a batch, in training and in validation, after one did not fit

    def load(self) -> None:
        """Load the model from disk; its weights carry no version until :meth:`load_weights`."""
        self.family = family_for(self.model.path, self.model.family)(
            self.model.path, dtype=self.dtype, device=self.device
        )
        self.family.shift = self.digen.sampling.shift
        self.transformer = self.family.load_transformer(attention_backend=self.model.attention_backend)
        settle(self.transformer, self.dtype, parameters=True)
        self.family.load_conditioner()
        self.lora_bound = 0
        if self.model.lora_rank:
            self.lora_bound = add_lora(
                self.transformer,
                rank=self.model.lora_rank,
                alpha=self.model.lora_alpha,
                target_modules=self.model.target_modules or self.family.lora_target_modules,
                dtype=self.dtype,
                seed=self.seed,
            )
        self.transformer.requires_grad_(False)
        self._published = {
            name: p for name, p in self.transformer.named_parameters() if not self.lora_bound or "lora_" in name
        }
        default = self.family.default_size()
        sampling = self.digen.sampling
        asked = (sampling.height, sampling.width, sampling.num_frames)
        self.size = tuple(a if a is not None else d for a, d in zip(asked, default, strict=True))
        self.latent_shape = self.family.latent_shape(*self.size)

    def computed(self) -> dict[str, str]:
        """What the model computes with, see :func:`verl_digen.sync.checksum.computed_with`."""
        dtypes = {name: parameter.dtype for name, parameter in self.transformer.named_parameters()}
        return computed_with(dtypes, constants(self.transformer))

    # ---- weights -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> tuple[int, int]:
        """Take a published version.

        Returns:
            (checksum of what the model holds now, number of tensors).

        Raises:
            ValueError: an unknown name, a wrong shape, or tensors missing; the old version is then no longer whole and
                the replica reports no version.
        """
        self.version = None
        missing = set(self._published)
        for name, tensor in tensors:
            own = self._published.get(name)
            if own is None or own.shape != tensor.shape:
                shape = None if own is None else tuple(own.shape)
                raise ValueError(f"published tensor {name} {tuple(tensor.shape)} fits no parameter here (own: {shape})")
            own.copy_(tensor)
            missing.discard(name)
        if missing:
            raise ValueError(
                f"{len(missing)} of {len(self._published)} tensors were not published: {sorted(missing)[:3]}"
            )
        self.version = version
        return tensors_checksum(self._published.items()), len(self._published)

    def published(self) -> Iterable[tuple[str, torch.Tensor]]:
        """The tensors that a publish carries, as they are held here."""
        return ((name, parameter.detach()) for name, parameter in self._published.items())

    def to(self, device: torch.device) -> None:
        """Move the model (sleep and wake-up of colocated placement)."""
        self.transformer.to(device)

    # ---- sampling ------------------------------------------------------------------------------------------

    def guidance(self, validate: bool) -> Guidance:
        scale = self.digen.validation.guidance_scale if validate else None
        return Guidance.of(self.digen.sampling, scale)

    def num_steps(self, validate: bool) -> int:
        return (self.digen.validation.num_steps if validate else None) or self.digen.sampling.num_steps

    def effective(self, validate: bool) -> dict:
        """Sampling parameters as they are really used, for the check against the request."""
        return self.family.effective_parameters(
            self.num_steps(validate), *self.size, guidance=self.guidance(validate), transformer=self.transformer
        )

    def embeddings(self, prompt: str) -> dict[str, torch.Tensor]:
        """Prompt tensors, encoded once per prompt and kept."""
        if prompt not in self._cache:
            (self._cache[prompt],) = self.family.encode_prompts([prompt])
            if len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        self._cache.move_to_end(prompt)
        return self._cache[prompt]

    def selection(self, group: PromptGroup, training_step: int) -> StepSelection:
        """Steps of a group, drawn from its key (or from the training step's)."""
        options = self.digen.sampling.selection
        owner = group.uid if options.per == "group" else f"step{training_step}"
        return select_steps(
            options.kind,
            self.digen.sampling.num_steps,
            key=sample_key(self.seed, owner, 0, "window"),
            window_size=options.window_size,
            window_range=None if options.window_range is None else tuple(options.window_range),
            mode=options.mode,
            training_step=training_step - 1,
            stride=options.stride,
            iterations=options.iterations,
            fraction=options.fraction,
            transition_kind=self.digen.sampling.kind,
        )

    def run(self, fragment: Fragment) -> DenoisedFragment:
        """Denoise, decode. Raises whatever the model raises; nothing is kept of a failed fragment.

        A batch that does not fit into memory is done in halves, and later ones of its kind are too: a row does not
        depend on its neighbours, but for rounding.
        """
        samples = fragment.samples
        if len(samples) <= self._fits.get(fragment.validate, len(samples)):
            try:
                return self._run(fragment)
            except torch.OutOfMemoryError:
                if len(samples) == 1:
                    raise
                self._fits[fragment.validate] = len(samples) // 2
            logger.warning("%d samples do not fit into memory together: halved", len(samples))
            release_cached()  # not in the handler: the error's traceback holds the tensors of the batch
        middle = (len(samples) + 1) // 2
        return _joined([self.run(replace(fragment, samples=part)) for part in (samples[:middle], samples[middle:])])

    @torch.no_grad()
    def _run(self, fragment: Fragment) -> DenoisedFragment:
        validate = fragment.validate
        marks = [self._mark()]
        guidance = self.guidance(validate)
        groups = [fragment.groups[uid] for uid, _ in fragment.samples]
        embeddings = {
            uid: (
                self.embeddings(group.prompt),
                self.embeddings(group.negative_prompt) if guidance.uses_cfg else None,
            )
            for uid, group in fragment.groups.items()
        }
        cond = stack_conditions([embeddings[g.uid][0] for g in groups])
        negative = stack_conditions([embeddings[g.uid][1] for g in groups]) if guidance.uses_cfg else None
        marks.append(self._mark())

        samples = list(fragment.samples)
        x = initial_noise(
            self.seed,
            samples,
            self.latent_shape,
            same_noise=self.digen.sampling.same_noise and not validate,
            dtype=self.arithmetic,
            device=self.device,
        )
        selections = None if validate else [self.selection(g, fragment.training_step) for g in groups]
        result = run_to_end(
            denoise(
                lambda x, sigma, i: self.family.predict(self.transformer, x, sigma, cond, guidance, negative=negative),
                x,
                self.family.sigmas(self.num_steps(validate), *self.size),
                kind="ode" if validate else self.digen.sampling.kind,
                eta=0.0 if validate else self.digen.sampling.eta,
                selections=selections,
                noise_fn=lambda i: transition_noise(
                    self.seed, samples, i, self.latent_shape, dtype=self.arithmetic, device=self.device
                ),
                dtype=self.arithmetic,
                record=not validate,
            )
        )
        marks.append(self._mark())
        pixels = self.family.decode(result.x_final)
        marks.append(self._mark())
        phases = dict(zip(("encode", "denoise", "decode"), np.diff(marks).tolist(), strict=True))
        return DenoisedFragment(result, selections or [], pixels, noise_hash(x), embeddings, phases)

    def _mark(self) -> float:
        """The clock, when the device has done all it was asked for."""
        self.family.synchronize()
        return time.perf_counter()


def _joined(parts: list[DenoisedFragment]) -> DenoisedFragment:
    """Parts of a fragment as one, in their order."""
    results = [part.result for part in parts]
    of_steps = [result.step_log_probs for result in results]
    return DenoisedFragment(
        result=DenoiseResult(
            x_final=torch.cat([result.x_final for result in results]),
            latents=[row for result in results for row in result.latents],
            sigmas=[row for result in results for row in result.sigmas],
            log_probs=[row for result in results for row in result.log_probs],
            starts=[row for result in results for row in result.starts],
            step_log_probs=None if of_steps[0] is None else torch.cat(of_steps, dim=1),
        ),
        selections=[selection for part in parts for selection in part.selections],
        pixels=np.concatenate([part.pixels for part in parts]),
        noise_hashes=[noise for part in parts for noise in part.noise_hashes],
        embeddings={uid: tensors for part in parts for uid, tensors in part.embeddings.items()},
        phases={name: sum(part.phases[name] for part in parts) for name in parts[0].phases},
    )
