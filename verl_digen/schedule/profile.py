"""What things cost: running estimates of measured durations, and the profile that decisions read.

A live run keeps running estimates (``measure``); every decision reads a frozen :class:`Profile` taken from them. The
simulator starts from a given profile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from verl_digen.schedule.tsp import tile_rounds
from verl_digen.schedule.work import TrainerPool, require_not_negative, require_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Costs in seconds on a device of speed 1.

    Attributes:
        denoise_s: one denoising step of one sample, growing part (guidance passes included).
        denoise_fixed_s: part of a denoising step that does not grow with the batch of a replica.
        encode_s: prompt encoding, once per group and replica.
        decode_s: decoding of one sample.
        score_s: reward latency of one sample.
        train_cell_s: forward and backward of one cell on one rank.
        tile_fixed_s: exposed communication and launch time of one tile.
        logprob_cell_s, logprob_fixed_s: the same two for the forward pass that recomputes old log-probs.
        commit_s: gradient reduction and optimizer step of a logical batch.
        publish_s: from commit until replicas may take the new version.
        publish_block_s: part of the publish in which the Trainer cannot work.
        phase_switch_s: colocated placement only, one change between generating and training.
        helper_denoise_s: one denoising step of one sample on a Trainer rank.
        helper_fixed_s: part of that step that does not grow (weight gathering).
        helper_in_s, helper_out_s: switch of the Trainer into and out of generating.
    """

    denoise_s: float
    train_cell_s: float
    denoise_fixed_s: float = 0.0
    encode_s: float = 0.0
    decode_s: float = 0.0
    score_s: float = 0.0
    tile_fixed_s: float = 0.0
    logprob_cell_s: float = 0.0
    logprob_fixed_s: float = 0.0
    commit_s: float = 0.0
    publish_s: float = 0.0
    publish_block_s: float = 0.0
    phase_switch_s: float = 0.0
    helper_denoise_s: float = 0.0
    helper_fixed_s: float = 0.0
    helper_in_s: float = 0.0
    helper_out_s: float = 0.0

    def __post_init__(self) -> None:
        require_positive(self, "denoise_s", "train_cell_s")
        require_not_negative(self, *(f.name for f in fields(self)))
        if self.publish_block_s > self.publish_s:
            raise ValueError(
                f"profile: publish_block_s={self.publish_block_s} is a part of publish_s={self.publish_s} "
                f"and cannot exceed it"
            )

    def helper_step_s(self, load: float = 1) -> float:
        """One denoising step of ``load`` samples per rank on the Trainer; the rollout cost where none was given."""
        if self.helper_denoise_s == 0:
            return self.denoise_fixed_s + self.denoise_s * load
        return self.helper_fixed_s + self.helper_denoise_s * load

    @property
    def helper_switch_s(self) -> float:
        """Switch cost in and out, s."""
        return self.helper_in_s + self.helper_out_s

    def generate_s(self, steps: int, load: float, speed: float = 1.0) -> float:
        """Time of a replica to denoise and decode a batch of ``load`` samples from the first step to the last."""
        return (steps * (self.denoise_fixed_s + self.denoise_s * load) + self.decode_s * load) / speed

    def train_s(
        self,
        samples: int,
        transitions: int,
        trainer: TrainerPool,
        *,
        max_cells: int,
        tsp: bool,
        recompute: bool = False,
    ) -> float:
        """Time of the Trainer for a fragment of ``samples`` × ``transitions`` cells.

        Without TSP a tile is one transition of a rank's own samples: K·(compute + communication). With TSP
        the cells are dealt evenly to the ranks and cut into tiles of ``max_cells``. ``recompute`` adds the
        forward pass for old log-probs.
        """
        rounds, cells = tile_rounds(samples, transitions, trainer.ranks, max_cells, tsp)
        seconds = cells * self.train_cell_s + rounds * self.tile_fixed_s
        if recompute:
            seconds += cells * self.logprob_cell_s + rounds * self.logprob_fixed_s
        return seconds / trainer.speed


class RunningEstimate:
    """Mean and variance of a duration, with a prior for the cold start and a guard against outliers.

    The mean is an exponential average whose weight is 1/count at first, so early measurements count
    fully. A value further than ``outlier_sigma`` standard deviations from the mean (and further than
    half the mean) is clipped to that distance; ``patience`` such values in a row that agree with each other (within
    half of the largest) mean that the level has changed, and the estimate starts anew from them.

    Args:
        prior: value returned before anything is measured, seconds.
        window: number of measurements the average remembers.
    """

    __slots__ = (
        "prior",
        "window",
        "outlier_sigma",
        "patience",
        "count",
        "mean",
        "variance",
        "_suspects",
        "outliers",
    )

    def __init__(
        self, prior: float | None = None, *, window: int = 32, outlier_sigma: float = 4.0, patience: int = 3
    ) -> None:
        if window < 1 or patience < 1 or outlier_sigma <= 0:
            raise ValueError(f"estimate: window={window}, patience={patience}, outlier_sigma={outlier_sigma}")
        self.prior = prior
        self.window = window
        self.outlier_sigma = outlier_sigma
        self.patience = patience
        self.count = 0
        self.mean = 0.0
        self.variance = 0.0
        self.outliers = 0
        self._suspects: list[float] = []

    @property
    def value(self) -> float:
        """The mean, or the prior while cold. ``ValueError`` when there is neither."""
        if self.count:
            return self.mean
        if self.prior is None:
            raise ValueError("estimate: nothing measured yet and no prior given")
        return self.prior

    @property
    def std(self) -> float:
        return math.sqrt(self.variance)

    def observe(self, seconds: float) -> None:
        """Take one measurement in. ``ValueError`` when it is negative or not finite."""
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"estimate: a duration must be finite and not negative, got {seconds!r}")
        if self.count >= 3:
            limit = max(self.outlier_sigma * self.std, 0.5 * self.mean)
            distance = seconds - self.mean
            if abs(distance) > limit:
                self._suspect(seconds, self.mean + math.copysign(limit, distance))
                return
        self._suspects.clear()
        self._blend(seconds)

    def _suspect(self, seconds: float, clipped: float) -> None:
        self.outliers += 1
        self._suspects = [*self._suspects, seconds][-self.patience :]
        spread = max(self._suspects) - min(self._suspects)
        if len(self._suspects) < self.patience or spread > 0.5 * max(self._suspects):
            self._blend(clipped)
            return
        level, self._suspects = self._suspects, []
        self.count, self.mean, self.variance = 0, 0.0, 0.0
        for value in level:
            self._blend(value)

    def _blend(self, seconds: float) -> None:
        self.count += 1
        weight = 1.0 / min(self.count, self.window)
        distance = seconds - self.mean
        self.mean += weight * distance
        self.variance = (1.0 - weight) * (self.variance + weight * distance * distance) if self.count > 1 else 0.0

    def state_dict(self) -> dict:
        return {"count": self.count, "mean": self.mean, "variance": self.variance, "outliers": self.outliers}
