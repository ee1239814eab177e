"""Where a process of `make gpu` measures, how long it may, and where its results go."""

from __future__ import annotations

import argparse
import faulthandler
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.jsonlines import append


class Place(NamedTuple):
    """Where a section measures, and for how long."""

    device: torch.device
    results: Path
    #: On :func:`time.monotonic`'s clock.
    deadline: float

    @property
    def is_gpu(self) -> bool:
        """False where the CPU stands in its place: sizes are small then, and numbers mean nothing."""
        return self.device.type == "cuda"

    def left(self) -> float:
        """Seconds until the process is ended."""
        return self.deadline - time.monotonic()

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def add(self, section: str, **facts: Any) -> None:
        """One line of results, on disk when this returns."""
        append(self.results, {"section": section, **facts})


def from_command_line(*positional: str) -> tuple[Place, list[str]]:
    """The place that the section's process was started for, and its other arguments.

    Shortly before its time is over the process prints where each of its threads is.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=600.0)
    for name in positional:
        parser.add_argument(name)
    found = parser.parse_args()
    faulthandler.dump_traceback_later(max(found.seconds - 2.0, 1.0))
    device = torch.device("cuda", 0) if found.device == "cuda" else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    deadline = time.monotonic() + found.seconds
    return Place(device, found.results, deadline), [getattr(found, name) for name in positional]
