"""Reads quantised tensors: elements in a narrow format, with a scale for the tensor or for each block.

Read from their attributes; none of their methods runs. Supported are torchao 0.18 (``OptimState8bit``,
``OptimState4bit``, ``OptimStateFp8``) and MS-AMP 0.4.0 (``ScalingTensor``, ``ScalingParameter``: no tensors).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from precdoctor.recording.model import static


@dataclass(frozen=True)
class Quantised:
    """A quantised tensor, decoded.

    Attributes:
        format: of a stored element: a dtype, or ``codebook8`` and ``codebook4`` for an index into a table.
        values: the dequantised elements, FP32.
        multipliers: the factor that each block was multiplied by before rounding, FP32, one per block.
    """

    format: str
    values: Tensor
    multipliers: Tensor


def quantised(x: Any) -> Quantised | None:
    """Return the decoded tensor; None for other classes, and if its parts are not as expected.

    Runs tensor ops: call it apart from the user's modes.
    """
    x = _local(x)
    read = _KNOWN.get(_class(x))
    return None if read is None else read(x)


def is_quantised(x: Any) -> bool:
    """Return whether an object is of a supported class."""
    return _class(_local(x)) in _KNOWN


def scales(x: Any) -> Tensor | None:
    """Return the stored scales of an object of a supported class; None if they are missing."""
    x = _local(x)
    found = static.attribute(x, "scale")
    if found is None:
        found = static.attribute(static.attribute(x, "meta"), "scale_inv")
    return found.detach() if type(found) is Tensor else None


def _class(x: Any) -> tuple[str, str]:
    """Return the key of an object's class in ``_KNOWN``."""
    return type(x).__module__.partition(".")[0], type(x).__name__


def _local(x: Any) -> Any:
    """Return the local shard of a DTensor; anything else as it is."""
    return static.attribute(x, "_local_tensor") if type(x).__name__ == "DTensor" else x


def _parts(x: Any) -> tuple[Tensor, Tensor] | None:
    """Return codes and FP32 scales of a torchao tensor; None if they do not fit together."""
    codes, scale = static.attribute(x, "codes"), static.attribute(x, "scale")
    if type(codes) is not Tensor or type(scale) is not Tensor or not scale.numel() or not codes.numel():
        return None
    return None if codes.numel() % scale.numel() else (codes.detach(), scale.detach().float())


def _by_table(x: Any, *, packed: bool) -> Quantised | None:
    """Decode indices into a table; ``packed``: two per byte."""
    parts, table = _parts(x), static.attribute(x, "qmap")
    if parts is None or type(table) is not Tensor or parts[0].dtype is not torch.uint8:
        return None
    codes, scale = parts
    if packed:
        codes = torch.stack([codes >> 4, codes & 15], dim=-1)
    values = table.detach()[codes.int()].reshape(scale.numel(), -1) * scale[:, None]
    return Quantised("codebook4" if packed else "codebook8", values.reshape(_shape(x)), scale.reciprocal())


def _float8(x: Any) -> Quantised | None:
    parts = _parts(x)
    if parts is None or not parts[0].is_floating_point():
        return None
    codes, scale = parts
    values = codes.float().reshape(scale.numel(), -1) * scale[:, None]
    return Quantised(str(codes.dtype).removeprefix("torch."), values.reshape(_shape(x)), scale.reciprocal())


def _scaling_tensor(x: Any) -> Quantised | None:
    """Decode ``value`` (FP8 as bytes, FP16 or FP32) times ``meta.scale_inv``."""
    value, meta = static.attribute(x, "value"), static.attribute(x, "meta")
    inverse = static.attribute(meta, "scale_inv")
    dtype = _QTYPES.get(static.text(static.attribute(static.attribute(meta, "qtype"), "name")))
    if dtype is None or not issubclass(type(value), Tensor) or type(inverse) is not Tensor or inverse.numel() != 1:
        return None
    codes = value.detach()
    if codes.dtype is not dtype:
        if codes.element_size() != 1 or dtype.itemsize != 1:
            return None
        codes = codes.view(dtype)
    factor = inverse.detach().float().reshape(())
    return Quantised(str(dtype).removeprefix("torch."), codes.float() * factor, factor.reciprocal().reshape(1))


def _shape(x: Tensor) -> torch.Size:
    """Return the shape of a tensor subclass without running its code."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.shape


#: Names in MS-AMP's ``Dtypes``.
_QTYPES: Final = {
    "kFloat8E4M3": torch.float8_e4m3fn,
    "kFloat8E5M2": torch.float8_e5m2,
    "kFloat16": torch.float16,
    "kBFloat16": torch.bfloat16,
    "kFloat32": torch.float32,
}
#: Decoders by package and class name.
_KNOWN: Final[dict[tuple[str, str], Callable[[Any], Quantised | None]]] = {
    ("torchao", "OptimState8bit"): partial(_by_table, packed=False),
    ("torchao", "OptimState4bit"): partial(_by_table, packed=True),
    ("torchao", "OptimStateFp8"): _float8,
    ("msamp", "ScalingTensor"): _scaling_tensor,
    ("msamp", "ScalingParameter"): _scaling_tensor,
}
