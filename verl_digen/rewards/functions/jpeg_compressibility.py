"""How small a picture gets as JPEG: a reward that needs no model (DDPO, arXiv 2305.13301, section 6.1)."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from verl_digen.rewards.functions import register_reward


@register_reward("jpeg_compressibility")
def jpeg_compressibility(
    images: np.ndarray, prompt: str, ground_truth: str, extra: dict, *, quality: int = 95
) -> dict[str, Any]:
    """Minus the size of the JPEG file in kB (1000 bytes), headers included; for a video, the mean over its frames.

    Args:
        images: uint8 [H, W, C] or [F, H, W, C], C = 1 or 3.
        quality: PIL's JPEG quality, 1 to 95.

    Returns:
        ``score`` (below 0, nearer 0 is better) and ``jpeg_kb``.

    Raises:
        ValueError: another dtype, shape or number of channels.
    """
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or images.shape[-1] not in (1, 3):
        raise ValueError(
            "jpeg_compressibility reads uint8 [H, W, 1 or 3] or [F, H, W, 1 or 3], "
            f"got {images.dtype} {list(images.shape)}"
        )
    frames = images if images.ndim == 4 else images[None]
    kilobytes = float(np.mean([_jpeg_bytes(frame, quality) for frame in frames])) / 1000
    return {"score": -kilobytes, "jpeg_kb": kilobytes}


def _jpeg_bytes(frame: np.ndarray, quality: int) -> int:
    from PIL import Image

    buffer = io.BytesIO()
    picture = Image.fromarray(frame[..., 0] if frame.shape[-1] == 1 else frame)
    picture.save(buffer, format="JPEG", quality=quality)
    return buffer.tell()
