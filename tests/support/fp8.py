"""FP8 operands in synthetic runs: rows counted from arrays, by the definition of the columns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from precdoctor.numerics.formats import E4M3FN, E5M2, Format
from tests.support.references import blocks_of
from tests.support.training import CLASSES, ROOT, Row, Training, histogram

Floats = np.ndarray
SHAPE = (32, 256)
_NAMES = ("input", "weight", "grad_output")


def draws(seed: int = 0, shape: tuple[int, int] = SHAPE) -> Callable[[int], Floats]:
    """Gaussian activations, others at each step."""
    return functools.lru_cache(maxsize=None)(lambda step: np.random.default_rng((seed, step)).standard_normal(shape))


def operand_row(values: Floats, scale: float | None, fmt: Format = E4M3FN) -> Row:
    """What a recorder leaves of a cast of ``values * scale``; a scale of None: applied, but not known."""
    with np.errstate(invalid="ignore", over="ignore"):
        x = np.asarray(values, dtype=np.float64) * (1.0 if scale is None else scale)
    finite = np.where(np.isfinite(x), np.abs(x), 0.0)
    beyond = finite >= fmt.overflow_limit if fmt.tie_overflows else finite > fmt.overflow_limit
    row: Row = {"amin_nonzero": None, "exp_lo": None, "exp_hist": None, **histogram(x)}
    row |= {
        "shape": list(x.shape),
        "scale": scale,
        "format": fmt.dtype,
        "saturated": int(beyond.sum()),
        "flushed": int(((finite > 0) & (finite <= fmt.flush_limit)).sum()),
    }
    for size in (32, 128):
        blocks = blocks_of(finite, size)
        row[f"block{size}_hist"] = list(blocks.below)
        row[f"block{size}_amax_lo"] = blocks.amax.lo
        row[f"block{size}_amax_hist"] = blocks.amax.counts.tolist()
    return row


def add_operand(
    run: Training,
    module: str,
    name: str,
    cast: Callable[[int], tuple[Floats, float | None]],
    fmt: Format = E4M3FN,
    **columns: Any,
) -> Training:
    """One operand of ``module`` on every step, right before its output (a gradient: its gradient); ``cast(step)`` gives
    the values and the scale.
    """
    kind = "grad_output" if name.startswith("grad") else "output"
    for step, rows in run.tensors.items():
        at = next(i for i, r in enumerate(rows) if r["kind"] == kind and r["module"] == module)
        order = rows[at]["order"]
        for row in rows[at:]:
            row["order"] += row["order"] is not None and 1
        rows.insert(
            at,
            {
                "step": step,
                "root": ROOT,
                "module": module,
                "module_class": CLASSES.get(module),
                "kind": "fp8_operand",
                "name": name,
                "order": order,
                "first_bad_order": None,
                "phase": "train",
                "dtype": "float32",
                **operand_row(*cast(step), fmt),
                **columns,
            },
        )
    return run


def fill(values: Floats, fmt: Format = E4M3FN) -> float:
    """The scale of current scaling; 1 for zeros."""
    amax = float(np.abs(values).max())
    return fmt.max / amax if amax else 1.0


def current(draw: Callable[[int], Floats], fmt: Format = E4M3FN) -> Callable[[int], tuple[Floats, float]]:
    """Casts at the scale of the tensor's own amax."""
    return lambda step: (draw(step), fill(draw(step), fmt))


def delayed(
    draw: Callable[[int], Floats], history: int, fmt: Format = E4M3FN, margin: int = 0
) -> Callable[[int], tuple[Floats, float]]:
    """Casts at the scale of the largest amax of the steps before; 1 at the first one."""

    amax = functools.lru_cache(maxsize=None)(lambda s: float(np.abs(draw(s)).max()))

    def cast(step: int) -> tuple[Floats, float]:
        seen = [amax(s) for s in range(max(0, step - history), step)]
        usable = [a for a in seen if a > 0.0]
        return draw(step), (fmt.max / max(usable) / 2.0**margin if usable else 1.0)

    return cast


def in_fp8(steps: int = 12, casts: Mapping[tuple[str, str], Any] | None = None) -> Training:
    """A training with a layer in FP8, current scaling, the gradient in E5M2; ``casts`` in place of these or beside."""
    run = Training(steps=steps)
    layer = {("blocks.0.mlp.up", name): current(draws(i), _format(name)) for i, name in enumerate(_NAMES)}
    for (module, name), cast in {**layer, **(casts or {})}.items():
        add_operand(run, module, name, cast, _format(name))
    return run


def _format(name: str) -> Format:
    return E5M2 if name == "grad_output" else E4M3FN
