"""What a list of ops keeps of a tensor in place of its elements: a fingerprint, extremes, sums and a sketch."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from precdoctor.numerics import sketch
from precdoctor.recording import kernels
from precdoctor.recording.kernels import row_layout as at
from precdoctor.recording.model import tensor_leaves

#: Elements that are brought to FP64 at a time.
_PIECE = 64 * sketch.TILE
#: What integers of so many bytes are read as: their bits are all that counts.
_BITS = {8: torch.float64, 4: torch.float32, 2: torch.float16, 1: torch.float8_e4m3fn}


class Print(NamedTuple):
    """The columns of one tensor; all but the fingerprint are null of integers."""

    fingerprint: int | None
    nan: int | None = None
    pos_inf: int | None = None
    neg_inf: int | None = None
    amax: float | None = None
    sum: float | None = None
    sum_sq: float | None = None
    sketch: list[float] | None = None


def print_of(x: Tensor) -> Print:
    """Read a tensor; waits for its device. Everything is null of one without dense memory of its own."""
    dense = tensor_leaves.plain(x)
    if dense is None:
        return Print(_fingerprint_of_bits(x))
    dense = dense.detach()
    ints, floats = kernels.measured(dense, fingerprint=True)
    nan, pos_inf, neg_inf = (int(ints[i]) for i in (at.NAN, at.POS_INF, at.NEG_INF))
    fingerprint = int(ints[at.FINGERPRINT]) & 0xFFFF_FFFF_FFFF_FFFF
    if int(ints[at.NUMEL]) == nan + pos_inf + neg_inf:
        return Print(fingerprint, nan, pos_inf, neg_inf)
    amax, total, squares = (float(floats[i]) for i in (at.AMAX, at.SUM, at.SUM_SQ))
    return Print(fingerprint, nan, pos_inf, neg_inf, amax, total, squares, sketch_of(dense))


def _fingerprint_of_bits(x: Tensor) -> int | None:
    if type(x) not in tensor_leaves.EXACT or x.layout is not torch.strided or x.is_meta or x.is_quantized:
        return None
    if x.is_nested or not x.numel() or not x.untyped_storage().nbytes() or x.is_floating_point() or x.is_complex():
        return None
    if torch._C._functorch.maybe_current_level() is not None or x.element_size() not in _BITS:
        return None
    ints, _ = kernels.measured(x.detach().view(_BITS[x.element_size()]), fingerprint=True)
    return int(ints[at.FINGERPRINT]) & 0xFFFF_FFFF_FFFF_FFFF


def sketch_of(x: Tensor) -> list[float]:
    """The sketch of a dense tensor's finite elements (:mod:`precdoctor.numerics.sketch`)."""
    flat = kernels.measurable(x).reshape(-1)
    total = torch.zeros(sketch.WIDTH, dtype=torch.float64, device=flat.device)
    signs = _tile_signs(flat.device)
    for begin in range(0, flat.numel(), _PIECE):
        piece = torch.nan_to_num_(flat[begin : begin + _PIECE].double(), 0.0, 0.0, 0.0)
        width = sketch.TILE
        if flat.numel() < width:
            width = -(-flat.numel() // sketch.WIDTH) * sketch.WIDTH
        rows = -(-piece.numel() // width)
        piece = torch.nn.functional.pad(piece, (0, rows * width - piece.numel()))
        sums = (piece.view(rows, width) * signs[:width]).view(rows, -1, sketch.WIDTH).sum(1)
        factors = torch.from_numpy(sketch.repetition_signs(begin // sketch.TILE, rows)).to(flat.device)
        total += (sums * factors[:, None]).sum(0)
    found: list[float] = total.tolist()
    return found


@functools.cache
def _tile_signs(device: torch.device) -> Tensor:
    return torch.from_numpy(sketch.tile_signs().copy()).to(device)
