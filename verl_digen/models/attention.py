"""diffusers' attention switch, made to fail loudly.

``set_attention_backend`` skips processors that do not go through diffusers' dispatcher, so that a request for
flash attention can be silently without effect. Here such a model is an error, and so is a backend that cannot
be had on this machine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_CPU_BACKENDS = ("native", "_native_math", "flex")


def attention_backends(device: str | torch.device = "cpu") -> list[str]:
    """Names of the attention backends that can be had here, for a model on ``device``.

    Those whose kernels diffusers would download at run time are left out: code comes from installed packages only.
    """
    from diffusers.models import attention_dispatch

    check = getattr(attention_dispatch, "_check_attention_backend_requirements", None)
    usable = []
    for backend in attention_dispatch.AttentionBackendName:
        on_cpu = torch.device(device).type == "cpu"
        if backend.value.endswith("_hub") or (on_cpu and backend.value not in _CPU_BACKENDS):
            continue
        try:
            if check is not None:
                check(backend)
        except (RuntimeError, ImportError):
            continue
        usable.append(backend.value)
    return sorted(usable)


def use_attention_backend(transformer: nn.Module, backend: str, device: str | torch.device) -> None:
    """Switch ``transformer`` to ``backend`` and verify that its attention layers took it.

    Raises:
        ValueError: the backend cannot be had (the message lists those that can), or the model ignores the switch.
    """
    usable = attention_backends(device)
    if backend not in usable:
        raise ValueError(
            f"attention backend {backend!r} cannot be had here on {torch.device(device).type}; "
            f"available: {', '.join(usable)}"
        )
    transformer.set_attention_backend(backend)
    processors = list(transformer.attn_processors.values())
    deaf = sorted(
        {type(p).__name__ for p in processors if getattr(p, "_attention_backend", None) != backend}
        if processors
        else []
    )
    if deaf or not processors:
        raise ValueError(
            f"{type(transformer).__name__} ignores the attention backend {backend!r}: "
            f"its processors {', '.join(deaf) or '(none)'} do not use diffusers' dispatcher"
        )


class DispatchedJointAttention:
    """Joint attention of image and text tokens (MM-DiT, arXiv 2403.03206) through diffusers' dispatcher.

    Takes the place of ``JointAttnProcessor2_0``, which calls torch's attention directly and so ignores
    ``set_attention_backend``. Same inputs and outputs: ``hidden_states`` [B, N, D] and, for joint layers,
    ``encoder_hidden_states`` [B, L, D].
    """

    _attention_backend = None
    _parallel_config = None

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        qkv = _heads(attn, hidden_states, (attn.to_q, attn.to_k, attn.to_v), (attn.norm_q, attn.norm_k))
        if encoder_hidden_states is not None:
            projections = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
            norms = (attn.norm_added_q, attn.norm_added_k)
            added = _heads(attn, encoder_hidden_states, projections, norms)
            qkv = [torch.cat(pair, dim=1) for pair in zip(qkv, added, strict=True)]
        out = dispatch_attention_fn(
            *qkv, attn_mask=attention_mask, backend=self._attention_backend, parallel_config=self._parallel_config
        )
        out = out.flatten(2).to(qkv[0].dtype)
        num_image_tokens = hidden_states.shape[1]
        image = attn.to_out[1](attn.to_out[0](out[:, :num_image_tokens]))
        if encoder_hidden_states is None:
            return image
        text = out[:, num_image_tokens:]
        return image, text if attn.context_pre_only else attn.to_add_out(text)


def _heads(attn: Any, tokens: Tensor, projections: tuple, norms: tuple) -> list[Tensor]:
    """Query, key and value [B, N, heads, D/heads], the first two normalised where the layer has a norm."""
    q, k, v = (projection(tokens).unflatten(-1, (attn.heads, -1)) for projection in projections)
    return [q if norms[0] is None else norms[0](q), k if norms[1] is None else norms[1](k), v]
