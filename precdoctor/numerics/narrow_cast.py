"""Casts as text: a format and the scaling of a tensor before it, as plans name them and ``--apply`` makes them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from precdoctor.errors import UsageError
from precdoctor.numerics.blocks import BlockFormat, ScaleRule
from precdoctor.numerics.formats import Format, Kind
from precdoctor.numerics.names import find_format

#: Operands of a matrix product that can have a cast.
ROLES = ("weight", "input", "grad_output")
_NONE, _TENSOR = "none", "tensor"


@dataclass(frozen=True)
class NarrowCast:
    """A format, and the scaling of a tensor before it is cast.

    Attributes:
        format: of at most 32 bits.
        scaling: ``none``; ``tensor``, which brings the tensor's own amax to the format's maximum; a positive number;
            for a block format the rule of its scales, ``floor``, ``up`` or ``amax``.
    """

    format: Format | BlockFormat
    scaling: str

    def __str__(self) -> str:
        return f"{self.format.name} {self.scaling}"

    @property
    def element(self) -> Format:
        """The format of the elements."""
        return self.format.element if isinstance(self.format, BlockFormat) else self.format

    @property
    def scale(self) -> float | None:
        """The multiplier if it is the same for all tensors; None if each tensor or block has its own."""
        if isinstance(self.format, BlockFormat) or self.scaling == _TENSOR:
            return None
        return 1.0 if self.scaling == _NONE else float(self.scaling)

    @classmethod
    def of(cls, name: str, scaling: str) -> NarrowCast:
        """Return the cast to the format called ``name``.

        Raises:
            UsageError: the format or scaling is unknown, or cannot be applied to a tensor by itself.
        """
        fmt = find_format(name)
        element = fmt.element if isinstance(fmt, BlockFormat) else fmt
        if element.kind is not Kind.FLOAT or element.bits > 32 or not element.stored:
            raise UsageError(f"{fmt.name} cannot be applied; casts go to floating-point formats of at most 32 bits")
        if isinstance(fmt, BlockFormat):
            if fmt.block[0] != 1:
                raise UsageError(f"{fmt.name} cannot be applied; blocks of one row can")
            rules = [rule.value for rule in ScaleRule]
            fits, known = scaling in rules, ", ".join(rules)
        else:
            fits, known = scaling in (_NONE, _TENSOR) or _is_scale(scaling), "none, tensor or a positive number"
        if not fits:
            raise UsageError(f"{fmt.name} is scaled by {known}, not by {scaling!r}")
        return cls(fmt, scaling)


def parse_casts(text: str) -> dict[str, NarrowCast]:
    """Parse ``weight E4M3FN tensor, grad_output E5M2 tensor`` into casts by role; inverse of :func:`casts_in_words`.

    Raises:
        UsageError: a role is not in :data:`ROLES` or occurs twice, or a cast is invalid.
    """
    found: dict[str, NarrowCast] = {}
    for part in text.split(","):
        words = part.split()
        if len(words) != 3 or words[0] not in ROLES or words[0] in found:
            raise UsageError(f"casts are written as in 'weight E4M3FN tensor, grad_output E5M2 tensor', got {text!r}")
        found[words[0]] = NarrowCast.of(words[1], words[2])
    return found


def casts_in_words(casts: dict[str, NarrowCast]) -> str:
    """Return casts by role as one line of text."""
    return ", ".join(f"{role} {cast}" for role, cast in casts.items())


def _is_scale(text: str) -> bool:
    try:
        return 0.0 < float(text) < math.inf
    except ValueError:
        return False
