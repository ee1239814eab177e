"""The tensors predictions are held against: shapes that training makes, and shapes made to break bounds."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np

from precdoctor.numerics.formats import BF16, FP32

SAMPLES = Path(__file__).resolve().parents[3] / "sample_runs"
SIZE = (64, 128)

#: Those with a density: a point estimate of the SQNR makes sense for them.
CONTINUOUS = (
    "gaussian",
    "lognormal",
    "student",
    "bimodal",
    "one outlier",
    "per-channel",
    "relu",
    "bf16 gaussian",
    "laplace",
)
NAMES = (*CONTINUOUS, "all equal", "powers of two", "subnormal-heavy", "denormal bf16", "ties", "two values")


def tensor(name: str, seed: int):
    """Shape ``SIZE``, float64 holding values of the source format, and that format."""
    rng = np.random.default_rng(seed)
    size = 10.0 ** rng.uniform(-6, 3)
    normal = rng.standard_normal(SIZE)
    x = {
        "gaussian": lambda: normal * size,
        "lognormal": lambda: np.exp(rng.uniform(0.5, 3) * normal) * np.sign(rng.standard_normal(SIZE)) * size,
        "student": lambda: rng.standard_t(3, SIZE) * size,
        "bimodal": lambda: np.where(rng.random(SIZE) < 0.5, normal, normal * 2.0**-9) * size,
        "one outlier": lambda: _with_outlier(normal * size, 700 * size),
        "per-channel": lambda: normal * np.exp2(rng.uniform(-8, 8, (1, SIZE[1]))) * size,
        "relu": lambda: np.maximum(normal, 0.0) * size,
        "bf16 gaussian": lambda: normal * size,
        "laplace": lambda: rng.laplace(size=SIZE) * size,
        "all equal": lambda: np.full(SIZE, size),
        "powers of two": lambda: np.exp2(rng.integers(-24, 12, SIZE)) * np.sign(normal),
        "subnormal-heavy": lambda: normal * 2.0 ** rng.integers(-148, -120),
        "denormal bf16": lambda: normal * 2.0**-131,
        "ties": lambda: (2 * rng.integers(0, 2000, SIZE) + 1) * 2.0 ** int(rng.integers(-20, 0)),
        "two values": lambda: np.where(rng.random(SIZE) < 0.01, 3.0 * size, size * 2.0**-13),
    }[name]()  # fmt: skip
    narrow = "bf16" in name
    stored = x.astype(ml_dtypes.bfloat16 if narrow else np.float32).astype(np.float64)
    return stored, BF16 if narrow else FP32


def _with_outlier(x, value):
    x[3, 5] = value
    return x
