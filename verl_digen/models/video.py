"""What video families share: latents [C, frames, H, W], sizes and the frames that the VAE can make."""

from __future__ import annotations

from abc import abstractmethod

from verl_digen.models.family import ModelFamily


class VideoFamily(ModelFamily):
    """Latents [C, 1 + (F - 1) / temporal, H / spatial, W / spatial], with the VAE's compression."""

    trained_size: tuple[int, int, int]

    @property
    @abstractmethod
    def compression(self) -> tuple[int, int]:
        """(temporal, spatial): frames and pixels per latent position."""

    @property
    @abstractmethod
    def patch(self) -> tuple[int, int]:
        """(temporal, spatial) latent positions of one token of the transformer."""

    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        self.check_size(height, width, num_frames)
        temporal, spatial = self.compression
        channels = self.transformer_config["in_channels"]
        return channels, (num_frames - 1) // temporal + 1, height // spatial, width // spatial

    def default_size(self) -> tuple[int, int, int]:
        return self.trained_size

    def check_size(self, height: int, width: int, num_frames: int = 1) -> None:
        temporal, spatial = self.compression
        patch_t, patch = self.patch
        multiple = spatial * patch
        if height < 1 or width < 1 or height % multiple or width % multiple:
            raise ValueError(f"height and width must be positive multiples of {multiple}, got {height} x {width}")
        if num_frames < 1 or (num_frames - 1) % temporal:
            raise ValueError(f"num_frames must be 1 more than a multiple of {temporal}, got {num_frames}")
        if ((num_frames - 1) // temporal + 1) % patch_t:
            raise ValueError(f"num_frames={num_frames} gives latent frames that are no multiple of {patch_t}")
