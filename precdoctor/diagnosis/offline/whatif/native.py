"""Which formats the matrix units of a device support natively.

Sources: NVIDIA CUDA C++ Programming Guide, arithmetic types by compute capability (BF16 8.0, FP8 8.9); NVIDIA Blackwell
architecture (MXFP8, MXFP6, MXFP4, NVFP4: 10.0); NVIDIA Volta (FP16: 7.0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from precdoctor.diagnosis.offline.whatif.recipe import Recipe

_MX, _FP8 = (10, 0), (8, 9)


def needed_capability(recipe: Recipe) -> tuple[int, int] | None:
    """Return the first CUDA compute capability whose matrix units support the format; (0, 0) for any, None for none."""
    if recipe.block is not None and recipe.scaling in ("block32", "block16"):
        return _MX if recipe.name.startswith(("MX", "NV")) else None
    known = {"E4M3FN": _FP8, "E5M2": _FP8, "BF16": (8, 0), "TF32": (8, 0), "FP16": (7, 0), "INT8": (7, 2)}
    return (0, 0) if recipe.format.name in {"FP32", "FP64"} else known.get(recipe.format.name)


def not_native(recipes: Sequence[Recipe], device: Any) -> str | None:
    """Return a sentence that names the formats the recorded device does not support; None if it supports all, or if
    the device is unknown.
    """
    kind = device.get("type") if isinstance(device, Mapping) else None
    names = list(dict.fromkeys(r.name for r in recipes if needed_capability(r) != (0, 0)))
    if kind == "cpu":
        names = [n for n in names if n not in {"BF16", "FP16", "INT8"}]
        return f"Recorded on a CPU, which does not compute in {_and(names)}." if names else None
    capability = device.get("capability") if isinstance(device, Mapping) else None
    if kind != "cuda" or not isinstance(capability, (list, tuple)) or len(capability) != 2:
        return None
    have = (int(capability[0]), int(capability[1]))
    needed = {r.name: needed_capability(r) for r in recipes}
    lacking = {name: "no device" if n is None else f"{n[0]}.{n[1]}" for name, n in needed.items() if not n or have < n}
    if not lacking:
        return None
    parts = [f"{name} (needs {level})" for name, level in lacking.items()]
    return f"Not native to the recorded device, compute capability {have[0]}.{have[1]}: {_and(parts)}."


def _and(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
