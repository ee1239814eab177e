"""Consecutive step attempts of one optimizer that changed no weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from precdoctor.recording.model import static

#: In a row: half the scale did not help, so that it is worth a look whether the scale is to blame at all.
SUSPICIOUS_SKIPS = 2
#: Steps a loss scaler may skip in a row, after it has let one through, before that is an incident.
MAX_SKIPS = 6
#: A scale that has come down to this and still overflows does not suffer from the scale.
SCALE_FLOOR = 1.0


@dataclass
class Streak:
    """Skips in a row, and whether an attempt was ever let through.

    Each optimizer has its own: where several share a scaler, a backoff of it is one skip of each, and what the scaler
    lets through of one says nothing of another's gradients.
    """

    skips: int = 0
    let_through: bool = False

    def add(self, *, bad: bool) -> None:
        """One more attempt, with gradients or a loss that are not finite or without."""
        self.skips = self.skips + 1 if bad else 0
        self.let_through = self.let_through or not bad

    @property
    def is_suspicious(self) -> bool:
        """Whether it has just become worth a look."""
        return self.let_through and self.skips == SUSPICIOUS_SKIPS

    def is_stuck(self, scaler: torch.amp.GradScaler) -> bool:
        """Whether the scaler goes on skipping to no avail. Reads the scale, which waits for the device."""
        if self.let_through and self.skips >= MAX_SKIPS:
            return True
        scale = static.attribute(scaler, "_scale")
        return scale is not None and float(scale) <= SCALE_FLOOR
