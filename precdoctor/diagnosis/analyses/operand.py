"""The recorded facts of a tensor that an op read or made."""

from __future__ import annotations

from dataclasses import dataclass

from precdoctor.diagnosis.claims.words import non_finite, plural


@dataclass(frozen=True)
class Operand:
    """One tensor that an op read or made; extremes are over its finite elements."""

    argument: str
    dtype: str
    shape: tuple[int, ...]
    numel: int
    nan: int
    pos_inf: int
    neg_inf: int
    zero: int
    negative: int
    min: float | None
    max: float | None
    amax: float | None
    amin_nonzero: float | None
    first_bad: tuple[int, ...] | None
    #: The element at the position of the result's first non-finite element; None if unknown.
    value: float | None

    @property
    def bad(self) -> int:
        """The number of non-finite elements."""
        return self.nan + self.pos_inf + self.neg_inf

    def count_words(self) -> str:
        """Return ``12 NaN and 3 +Inf of 4,096 elements``."""
        counts = non_finite(self.nan, self.pos_inf, self.neg_inf) or "no non-finite value"
        return f"{counts} of {plural(self.numel, 'element')}"
