"""The limits that a cast has to meet: flushed and saturated share, and SQNR."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from precdoctor.numerics.arrays import Floats
from precdoctor.numerics.cast_counts import CastCounts
from precdoctor.numerics.prediction import Prediction

#: Upper bound of a relative error, so that an infinite error still gives a finite badness.
_HUGE = 1e300


@dataclass(frozen=True)
class Target:
    """Limits on the most likely values of a prediction.

    Attributes:
        max_flushed: largest share of the non-zero elements that may become zero. 0.5 %: the lowest of the bands 0.5, 2
            and 4 % published with NVIDIA BioNeMo, the only public ones; a starting point, not truth. Not applied to
            integers, whose steps are as wide at zero as anywhere: there the SQNR decides.
        max_saturated: largest share that may be clipped or overflow: none. Not applied to block scales that are rounded
            down, which clip by less than a binade by design: there the SQNR decides.
        min_sqnr_db: 20 dB, a relative error of a tenth. Chosen empirically: rounding alone leaves 31 dB in E4M3 and
            25 dB in E5M2, so a tensor below the limit has lost range, not just digits. 4-bit formats rarely reach it.
        min_bulk_db: least SQNR of the smaller nine tenths of the elements; None means not applied. See
            :meth:`~precdoctor.diagnosis.offline.whatif.recipe.Recipe.limits`.
    """

    max_flushed: float = 0.005
    max_saturated: float = 0.0
    min_sqnr_db: float = 20.0
    min_bulk_db: float | None = None

    def misses(self, prediction: Prediction, flushed: float) -> Iterator[str]:
        """Yield the limits that the likely values break: ``flushed``, ``saturated``, ``sqnr``, ``bulk``."""
        if flushed > self.max_flushed:
            yield "flushed"
        if prediction.saturated.estimate > self.max_saturated:
            yield "saturated"
        if prediction.sqnr_db.estimate < self.min_sqnr_db:
            yield "sqnr"
        if self._bulk_db(prediction) < 0.0:
            yield "bulk"

    def _bulk_db(self, prediction: Prediction) -> float:
        """Return how far the SQNR of the smaller elements is above its limit, in dB; infinite without a limit."""
        if prediction.bulk_sqnr_db is None or self.min_bulk_db is None:
            return math.inf
        return prediction.bulk_sqnr_db - self.min_bulk_db

    def badness(self, counts: CastCounts, error: Floats) -> Floats:
        """Return the largest ratio of a loss to its limit for each row, shape ``(rows,)``, to rank steps of one tensor.

        0 if nothing is lost. If the limit is 0, any loss counts as at least a thousand times the limit.

        ``error``: energy of the error over that of the row.
        """
        n = np.maximum(counts.elements, 1.0)
        error_limit = 10.0 ** (-self.min_sqnr_db / 10.0)
        out: Floats = np.sqrt(np.minimum(error / error_limit, _HUGE))
        out = np.maximum(out, _times(counts.flushed[2] / n, self.max_flushed))
        return np.maximum(out, _times(counts.saturated[2] / n, self.max_saturated))

    def distance(self, prediction: Prediction, flushed: float) -> float:
        """Return the largest ratio of a loss to its limit for a full prediction, to rank tensors."""
        sqnr = min(prediction.sqnr_db.estimate, self.min_sqnr_db + self._bulk_db(prediction))
        out = 0.0 if sqnr == math.inf else 10.0 ** (min(self.min_sqnr_db - sqnr, 6000.0) / 20.0)
        out = max(out, float(_times(np.array([flushed]), self.max_flushed)[0]))
        return max(out, float(_times(np.array([prediction.saturated.estimate]), self.max_saturated)[0]))


def _times(fraction: Floats, limit: float) -> Floats:
    """Return ``fraction / limit``; with a limit of 0, at least 1000 for any positive fraction."""
    if limit > 0.0:
        return fraction / limit
    return np.where(fraction > 0.0, 1e3 + 1e3 * fraction, 0.0)
