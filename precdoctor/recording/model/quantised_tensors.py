"""What quantised tensors hold: elements in a narrow format, and a scale for all or for each block of them.

Read from the attributes in which they are stored; no method of theirs runs. Followed are torchao 0.18
(``OptimState8bit``, ``OptimState4bit`` and ``OptimStateFp8``) and MS-AMP 0.4.0 (``ScalingTensor`` and
``ScalingParameter``, which are no tensors).
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
    """A tensor in a narrow format.

    Attributes:
        format: what an element is stored in: a dtype, or ``codebook8`` and ``codebook4`` for an index into a table.
        values: the elements, dequantised, float32.
        multipliers: what each block was multiplied by before it was rounded, float32, one per block.
    """

    format: str
    values: Tensor
    multipliers: Tensor


def quantised(x: Any) -> Quantised | None:
    """What an object of a known class stands for; null for any other, and for one whose parts are not as expected.

    Computes: to be called apart from the user's modes.
    """
    x = _local(x)
    read = _KNOWN.get(_class(x))
    return None if read is None else read(x)


def is_quantised(x: Any) -> bool:
    """Whether the class of an object is one of the known."""
    return _class(_local(x)) in _KNOWN


def scales(x: Any) -> Tensor | None:
    """The scales of an object of a known class, as it holds them."""
    x = _local(x)
    found = static.attribute(x, "scale")
    if found is None:
        found = static.attribute(static.attribute(x, "meta"), "scale_inv")
    return found.detach() if type(found) is Tensor else None


def _class(x: Any) -> tuple[str, str]:
    return type(x).__module__.partition(".")[0], type(x).__name__


def _local(x: Any) -> Any:
    return static.attribute(x, "_local_tensor") if type(x).__name__ == "DTensor" else x


def _parts(x: Any) -> tuple[Tensor, Tensor] | None:
    codes, scale = static.attribute(x, "codes"), static.attribute(x, "scale")
    if type(codes) is not Tensor or type(scale) is not Tensor or not scale.numel() or not codes.numel():
        return None
    return None if codes.numel() % scale.numel() else (codes.detach(), scale.detach().float())


def _by_table(x: Any, *, packed: bool) -> Quantised | None:
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
    """``value`` (FP8 as bytes, FP16 or FP32) times ``meta.scale_inv``."""
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
    with torch._C.DisableTorchFunctionSubclass():
        return x.shape


#: Names of MS-AMP's ``Dtypes``.
_QTYPES: Final = {
    "kFloat8E4M3": torch.float8_e4m3fn,
    "kFloat8E5M2": torch.float8_e5m2,
    "kFloat16": torch.float16,
    "kBFloat16": torch.bfloat16,
    "kFloat32": torch.float32,
}
#: By package and name of the class.
_KNOWN: Final[dict[tuple[str, str], Callable[[Any], Quantised | None]]] = {
    ("torchao", "OptimState8bit"): partial(_by_table, packed=False),
    ("torchao", "OptimState4bit"): partial(_by_table, packed=True),
    ("torchao", "OptimStateFp8"): _float8,
    ("msamp", "ScalingTensor"): _scaling_tensor,
    ("msamp", "ScalingParameter"): _scaling_tensor,
}
