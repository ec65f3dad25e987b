"""From what a live run measures to the :class:`~verl_digen.schedule.profile.Profile` that decisions read.

A denoising step and a tile cost a fixed part and a part that grows with their load (samples, cells). Both parts can be
told apart once different loads have been seen; until then all of the cost grows.
"""

from __future__ import annotations

from verl_digen.schedule.profile import Profile, RunningEstimate

MAX_LOADS = 64


class LoadCost:
    """Running estimates of a duration by load.

    Args:
        window: measurements that the estimate of one load remembers.
    """

    def __init__(self, *, window: int = 32) -> None:
        self._window = window
        self._by_load: dict[int, RunningEstimate] = {}

    def observe(self, load: int, seconds: float) -> None:
        """Take in that ``load`` took ``seconds``. ``ValueError`` for a load below one or a negative duration.

        Of more than 64 different loads the least measured is forgotten.
        """
        if load < 1:
            raise ValueError(f"profile: a load must be at least 1, got {load}")
        if load not in self._by_load and len(self._by_load) >= MAX_LOADS:
            rarest = min(self._by_load, key=lambda known: self._by_load[known].count)
            del self._by_load[rarest]
        self._by_load.setdefault(load, RunningEstimate(window=self._window)).observe(seconds)

    @property
    def known(self) -> bool:
        return bool(self._by_load)

    def parts(self) -> tuple[float, float]:
        """(fixed, growing per unit of load), seconds; least squares over the loads, neither part negative.

        Raises:
            ValueError: nothing was measured.
        """
        if not self._by_load:
            raise ValueError("profile: nothing was measured yet")
        points = [(load, estimate.mean, min(estimate.count, self._window)) for load, estimate in self._by_load.items()]
        weight = sum(w for _, _, w in points)
        load = sum(w * x for x, _, w in points) / weight
        seconds = sum(w * y for _, y, w in points) / weight
        spread = sum(w * (x - load) ** 2 for x, _, w in points)
        slope = sum(w * (x - load) * (y - seconds) for x, y, w in points) / spread if spread else seconds / load
        slope = min(max(slope, 0.0), seconds / load)  # beyond it the fixed part would be negative
        return max(0.0, seconds - slope * load), slope

    def state_dict(self) -> dict:
        return {str(load): estimate.state_dict() for load, estimate in self._by_load.items()}


class Measured:
    """Costs of a run as it goes on.

    ``denoise`` (load: samples) and ``tile`` (load: cells) are :class:`LoadCost`; the others are durations: ``encode``
    (a group), ``decode`` (a sample), ``score`` (latency of a fragment's rewards), ``fetch`` (a fragment's rows),
    ``tiles`` (of a fragment), ``commit``, ``publish``.
    """

    DURATIONS = ("encode", "decode", "score", "fetch", "tiles", "commit", "publish")

    def __init__(self) -> None:
        self.denoise, self.tile = LoadCost(), LoadCost()
        self._durations = {name: RunningEstimate(0.0) for name in self.DURATIONS}

    def observe(self, name: str, seconds: float) -> None:
        """Take in a duration; for ``tiles`` a number of tiles. ``ValueError`` for an unknown name."""
        if name not in self._durations:
            raise ValueError(f"profile: unknown duration {name!r}; known: {', '.join(self.DURATIONS)}")
        self._durations[name].observe(seconds)

    def value(self, name: str) -> float:
        return self._durations[name].value

    @property
    def known(self) -> bool:
        """Whether a profile can be made: something was denoised and something was trained."""
        return self.denoise.known and self.tile.known

    def profile(self) -> Profile:
        """What is known now, on the devices of this run. The time to fetch a fragment's rows counts with its tiles.

        Raises:
            ValueError: nothing was denoised or trained yet.
        """
        denoise_fixed, denoise = self.denoise.parts()
        tile_fixed, cell = self.tile.parts()
        tiles = self.value("tiles")
        fetching = self.value("fetch") / tiles if tiles else 0.0
        tiny = 1e-9  # a profile wants both growing parts above zero
        return Profile(
            denoise_fixed_s=denoise_fixed,
            denoise_s=max(denoise, tiny),
            encode_s=self.value("encode"),
            decode_s=self.value("decode"),
            score_s=self.value("score"),
            train_cell_s=max(cell, tiny),
            tile_fixed_s=tile_fixed + fetching,
            commit_s=self.value("commit"),
            publish_s=self.value("publish"),
            publish_block_s=self.value("publish"),
        )

    def state_dict(self) -> dict:
        return {
            "denoise": self.denoise.state_dict(),
            "tile": self.tile.state_dict(),
            "durations": {name: estimate.state_dict() for name, estimate in self._durations.items()},
        }
