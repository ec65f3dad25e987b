"""The floor: one process, torch and diffusers only, doing the work of a training step of the digits recipe.

A step is what the modes do: sample all trajectories, decode, score, group advantages, one forward and backward per
trained transition over all samples, clip, AdamW. No Ray, no veRL, and none of this package's sampling or training code,
so it is also a second writing of the mathematics. It differs where a bare loop would: noise comes from one generator
instead of a key per sample, nothing is stored, published, hashed or checked.

    python -m verl_digen.bench.floor SPEC.json RESULT.json
"""

from __future__ import annotations

import copy
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from verl_digen.bench.workload import FloorSpec

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Trajectories of B samples.

    Attributes:
        latents: [T + 1, B, 1, 8, 8].
        log_probs: [T, B]; meaningful where the transition is trained.
        trained: [B, K] transitions.
        embeds, pooled: prompt conditions [B, L, D] and [B, D].
    """

    latents: Tensor
    log_probs: Tensor
    trained: Tensor
    embeds: Tensor
    pooled: Tensor


class FloorLoop:
    """The loop of a :class:`FloorSpec`."""

    def __init__(self, spec: FloorSpec, dtype: torch.dtype = torch.float32):
        from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
        from transformers import CLIPTextModelWithProjection, PreTrainedTokenizerFast

        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        self.spec, self.dtype = spec, dtype
        folder = Path(spec.model)
        self.model = SD3Transformer2DModel.from_pretrained(folder / "transformer").to(dtype)
        self.text_encoder = CLIPTextModelWithProjection.from_pretrained(folder / "text_encoder").eval()
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
        scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler")
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1.0 / spec.num_steps, spec.num_steps).tolist())
        self.sigmas = scheduler.sigmas.to(torch.float32)
        self.reference = copy.deepcopy(self.model).eval().requires_grad_(False) if spec.kl_beta else None
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=spec.lr, betas=tuple(spec.betas), weight_decay=spec.weight_decay
        )
        self.generator = torch.Generator().manual_seed(spec.seed)
        self._encoded: dict[str, tuple[Tensor, Tensor]] = {}
        self.forward_cells = self.backward_cells = 0

    # ---- model ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Embeddings [P, L, D] and pooled [P, D]; each prompt is encoded once."""
        for prompt in set(prompts) - self._encoded.keys():
            tokens = self.tokenizer(
                [prompt], padding="max_length", max_length=8, truncation=True, return_tensors="pt"
            ).input_ids
            out = self.text_encoder(tokens)
            self._encoded[prompt] = (out.last_hidden_state[0].to(self.dtype), out.text_embeds[0].to(self.dtype))
        embeds, pooled = zip(*(self._encoded[prompt] for prompt in prompts), strict=True)
        return torch.stack(embeds), torch.stack(pooled)

    def velocity(self, x: Tensor, sigma: Tensor, embeds: Tensor, pooled: Tensor, model=None) -> Tensor:
        """Velocity [B, 1, 8, 8] at x with noise level sigma [B]."""
        return (model or self.model)(
            hidden_states=x,
            timestep=sigma.float() * 1000,
            encoder_hidden_states=embeds,
            pooled_projections=pooled,
            return_dict=False,
        )[0]

    def moments(self, x: Tensor, v: Tensor, sigma: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        """Mean [B, 1, 8, 8] and standard deviation [B] of the SDE transition (FlowGRPO, arXiv 2505.05470)."""
        sigma, following = sigma.to(self.dtype), following.to(self.dtype)
        step = following - sigma  # negative
        level = self.spec.eta * torch.sqrt(sigma / (1 - torch.where(sigma == 1, following, sigma)))
        drift = level**2 / (2 * sigma)

        def wide(a: Tensor) -> Tensor:
            return a[:, None, None, None]

        mean = x * (1 + wide(drift * step)) + v * wide((1 + drift * (1 - sigma)) * step)
        return mean, level * torch.sqrt(-step)

    @staticmethod
    def log_prob(x_next: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """Mean over the latent elements, [B]."""
        square = ((x_next - mean) ** 2).flatten(1).mean(1)
        return -square / (2 * std**2) - torch.log(std) - HALF_LOG_2PI

    # ---- the step ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def sample(self, prompts: Sequence[str], trained: Sequence[Sequence[int]]) -> Rollout:
        """n trajectories of each prompt: SDE at its trained transitions, ODE at the others."""
        n, steps = self.spec.n, self.spec.num_steps
        embeds, pooled = (a.repeat_interleave(n, 0) for a in self.encode(prompts))
        chosen = torch.tensor(trained).repeat_interleave(n, 0)
        is_sde = torch.zeros(len(chosen), steps, dtype=torch.bool).scatter_(1, chosen, True)
        batch, shape = len(chosen), (len(chosen), 1, 8, 8)
        x = torch.randn(shape, generator=self.generator).to(self.dtype)
        latents, log_probs = [x], []
        self.model.eval()
        for i in range(steps):
            sigma, following = self.sigmas[i].expand(batch), self.sigmas[i + 1].expand(batch)
            v = self.velocity(x, sigma, embeds, pooled)
            self.forward_cells += batch
            ode = x + v * (following - sigma)[:, None, None, None].to(self.dtype)
            x_next, log_prob = ode, torch.zeros(batch, dtype=self.dtype)
            if is_sde[:, i].any():
                mean, std = self.moments(x, v, sigma, following)
                noise = torch.randn(shape, generator=self.generator).to(self.dtype)
                drawn = mean + std[:, None, None, None] * noise
                log_prob = self.log_prob(drawn, mean, std)
                x_next = torch.where(is_sde[:, i, None, None, None], drawn, ode)
            x = x_next
            latents.append(x)
            log_probs.append(log_prob)
        return Rollout(
            latents=torch.stack(latents), log_probs=torch.stack(log_probs), trained=chosen, embeds=embeds, pooled=pooled
        )

    def rewards(self, x: Tensor, digits: Sequence[int]) -> Tensor:
        """Probability [B] that the classifier sees the prompted digit."""
        from verl_digen.rewards.functions.digit_classifier import digit_probabilities

        pixels = ((x.float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
        probabilities = torch.from_numpy(digit_probabilities(pixels))
        return probabilities.gather(1, torch.tensor(digits).repeat_interleave(self.spec.n)[:, None])[:, 0]

    def advantages(self, rewards: Tensor) -> Tensor:
        """(r - mean) / (std + 1e-4) of each group, [B]."""
        groups = rewards.view(-1, self.spec.n)
        scaled = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        return scaled.flatten().clamp(-self.spec.adv_max, self.spec.adv_max).to(self.dtype)

    def accumulate(self, rollout: Rollout, advantages: Tensor) -> None:
        """Gradients of the whole batch: one forward and backward per trained transition, with a KL one more forward."""
        spec, everyone = self.spec, torch.arange(len(advantages))
        planned = rollout.trained.numel()
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        for k in range(rollout.trained.shape[1]):
            at = rollout.trained[:, k]
            x, x_next = rollout.latents[at, everyone], rollout.latents[at + 1, everyone]
            sigma, following = self.sigmas[at], self.sigmas[at + 1]
            mean, std = self.moments(x, self.velocity(x, sigma, rollout.embeds, rollout.pooled), sigma, following)
            ratio = torch.exp(self.log_prob(x_next, mean, std) - rollout.log_probs[at, everyone])
            clipped = ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high)
            loss = torch.maximum(-advantages * ratio, -advantages * clipped)
            if self.reference is not None:
                with torch.no_grad():
                    v = self.velocity(x, sigma, rollout.embeds, rollout.pooled, self.reference)
                    initial, _ = self.moments(x, v, sigma, following)
                loss = loss + spec.kl_beta * ((mean - initial) ** 2).flatten(1).mean(1) / (2 * std**2)
                self.forward_cells += len(at)
            (loss.sum() / planned).backward()
            self.forward_cells += len(at)
            self.backward_cells += len(at)

    def step(self, index: int) -> dict[str, float]:
        """Step ``index`` of the spec; returns its mean reward."""
        spec = self.spec
        rollout = self.sample(spec.prompts[index], spec.trained[index])
        rewards = self.rewards(rollout.latents[-1], spec.digits[index])
        self.accumulate(rollout, self.advantages(rewards))
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), spec.clip_grad or float("inf"))
        self.optimizer.step()
        return {"reward": float(rewards.mean()), "grad_norm": float(norm)}


def run_floor(spec: FloorSpec) -> dict[str, list[float]]:
    """All steps of the spec: ``step_s``, ``reward`` and ``grad_norm``, one value per step; ``started`` (wall clock)."""
    loop = FloorLoop(spec)
    out: dict[str, list[float]] = {"step_s": [], "reward": [], "grad_norm": [], "started": [time.time()]}
    for index in range(len(spec.prompts)):
        started = time.perf_counter()
        result = loop.step(index)
        out["step_s"].append(time.perf_counter() - started)
        for name, value in result.items():
            out[name].append(value)
    return out


def main(spec_file: str, result_file: str) -> None:
    """Run the spec in ``spec_file``; write the result as JSON."""
    spec = FloorSpec(**json.loads(Path(spec_file).read_text()))
    Path(result_file).write_text(json.dumps(run_floor(spec)))


if __name__ == "__main__":
    main(*sys.argv[1:])
