"""FP16 training under a real GradScaler, without the training: gradients are given, the log is made from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from precdoctor.runlog import Run, open_run
from tests.support.runs import write_run
from tests.support.training import Row, histogram

ROOT = "Net#0"


@dataclass
class Scaled:
    """What the scaler did, and the log of it.

    Attributes:
        gradients: per step the true, unscaled gradients of each layer, in execution order.
        options: of ``torch.amp.GradScaler``.
        every: sampling.
    """

    gradients: Sequence[Sequence[np.ndarray]]
    options: dict[str, Any] = field(default_factory=dict)
    every: int = 1
    #: Only layers from this one on leave rows: the others are inside modules.
    seen_from: int = 0
    #: (scale, growth tracker, overflow) of each step.
    course: list[tuple[float, int, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.course = course(self.gradients, self.options)

    @property
    def facts(self) -> dict[str, Any]:
        """rank.json, with the scaler."""
        scaler = torch.amp.GradScaler("cpu", **self.options)
        return {
            "scalers": [
                {
                    "class": "GradScaler",
                    "enabled": True,
                    "init_scale": scaler._init_scale,
                    "growth_factor": scaler._growth_factor,
                    "backoff_factor": scaler._backoff_factor,
                    "growth_interval": scaler._growth_interval,
                }
            ]
        }

    def rows(self) -> list[Row]:
        """The tensors table: per layer the gradient of its output, in FP16, and that of its weight, kept in FP32."""
        rows = []
        for step, layers in enumerate(self.gradients):
            if step % self.every:
                continue
            scale = self.course[step][0]
            for order, x in enumerate(layers[self.seen_from :]):
                held = hold(x, scale)
                bad = not np.isfinite(held).all()
                place = {"step": step, "root": ROOT, "module": f"layers.{order + self.seen_from}", "scale": scale}
                first = {"order": 2 * order, "first_bad_order": 2 * order if bad else None}
                rows.append({**place, **first, "kind": "grad_output", "dtype": "float16", **histogram(held)})
                later = {"order": 2 * order + 1, "first_bad_order": 2 * order + 1 if bad else None}
                wide = {"kind": "weight_grad", "name": "weight", "dtype": "float32"}
                rows.append({**place, **later, **wide, **histogram(held.astype(np.float32))})
        return rows

    def step_rows(self) -> list[Row]:
        """The steps table."""
        rows = []
        for step, (scale, tracker, overflow) in enumerate(self.course):
            norm = float(np.sqrt(sum(np.square(x).sum() for x in self.gradients[step])))
            rows.append({
                "step": step, "loss": 1.0, "loss_scale": scale, "growth_tracker": tracker, "found_inf": overflow,
                "skipped": overflow, "sampled": step % self.every == 0, "grad_norm": np.nan if overflow else norm,
                "non_finite": int(overflow),
            })  # fmt: skip
        return rows

    def write(self, path: Path, **options: Any) -> Run:
        """The log."""
        return open_run(write_run(path, self.rows(), self.step_rows(), facts=self.facts, **options))


def hold(x: np.ndarray, scale: float) -> np.ndarray:
    """The gradient as FP16 holds it at a loss scale."""
    with np.errstate(over="ignore", invalid="ignore"):
        return (x * scale).astype(np.float16)


def overflows(layers: Sequence[np.ndarray], scale: float) -> bool:
    """Whether a step does, really."""
    return not all(np.isfinite(hold(x, scale)).all() for x in layers)


def course(gradients: Sequence[Sequence[np.ndarray]], options: dict[str, Any]) -> list[tuple[float, int, bool]]:
    """Scale, growth tracker and overflow of each step under a real ``torch.amp.GradScaler``."""
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", **options)
    out = []
    scaler.scale(torch.ones(()))
    for layers in gradients:
        scale, tracker = scaler.get_scale(), scaler._get_growth_tracker()
        bad = overflows(layers, scale)
        parameter.grad = torch.tensor([np.inf if bad else 1.0], dtype=torch.float32)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        out.append((scale, tracker, bad))
    return out
