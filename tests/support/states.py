"""Optimizer state in the rows of a training."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.support.training import NUMEL, Training, find, histogram, tensor

#: The head's gradient, drawn anew for every step.
_DRAWS = np.random.default_rng(1).normal(0.0, 1.0, (128, NUMEL))


def with_moment(
    run: Training,
    gradient: Callable[[int, np.ndarray], np.ndarray],
    dtype: str = "float32",
    *,
    every: int = 2,
    beta2: float = 0.999,
    forgets: bool = True,
    apart: int = 1,
) -> Training:
    """The head's gradient as the optimizer is given it, and the second moment that Adam makes of it.

    Args:
        run: to be changed.
        gradient: of a step, from its number and standard normal numbers.
        dtype: ``float32`` or ``float16``: what the moment is rounded to after each step.
        every: steps from one recorded moment to the next.
        forgets: false for a moment that goes up and never down.
        apart: optimizer steps from one step of ``run`` to the next.
    """
    v, decay = np.zeros(NUMEL), beta2**apart
    for step, rows in run.tensors.items():
        g = gradient(step, _DRAWS[step % len(_DRAWS)])
        exact = decay * v + (1.0 - decay) * g**2
        v = (exact if forgets else np.maximum(v, exact)).astype(dtype).astype(np.float64)
        find(rows, "weight_grad_step", "head").update({"amin_nonzero": None, "exp_lo": None, "exp_hist": None})
        find(rows, "weight_grad_step", "head").update(histogram(g))
        if step % every == 0:
            row = tensor(step, "opt_state", "head", len(rows), name="weight.exp_avg_sq", dtype=dtype)
            row |= {"exp_lo": None, "exp_hist": None, "amin_nonzero": None}
            rows.append(row | histogram(v))
    return run
