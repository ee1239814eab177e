"""The rows of a list of ops: operands and results of each op, and for each operand the earlier op that produced it."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from precdoctor.numerics import sketch
from precdoctor.recording import kernels
from precdoctor.recording.deepscan.scanned_op import Where
from precdoctor.recording.deepscan.targets import Targets
from precdoctor.recording.kernels import row_layout as at
from precdoctor.recording.model import tensor_leaves
from precdoctor.recording.ops.dispatched_ops import named_arguments, storage_key
from precdoctor.recording.ops.op_facts import plain_setting
from precdoctor.recording.ops.storage_notes import Notes
from precdoctor.recording.ops.tensor_facts import dtype_name
from precdoctor.runlog.caps import shortened

#: Number of elements converted to FP64 at a time.
_PIECE = 64 * sketch.TILE
#: Makes a fingerprint an unsigned number of 64 bits.
_UNSIGNED = 0xFFFF_FFFF_FFFF_FFFF
#: By element size of integers, the dtype as which they are fingerprinted: only bits count.
_BITS = {8: torch.float64, 4: torch.float32, 2: torch.float16, 1: torch.float8_e4m3fn}


class Print(NamedTuple):
    """The measured columns of one tensor; None: sizes without a finite element, all but the fingerprint of integers."""

    fingerprint: int | None
    nan: int | None = None
    pos_inf: int | None = None
    neg_inf: int | None = None
    amax: float | None = None
    sum: float | None = None
    sum_sq: float | None = None
    sketch: list[float] | None = None


def print_of(x: Tensor) -> Print:
    """Return the columns of a tensor; waits for its device. All are None if its memory cannot be read."""
    dense = tensor_leaves.plain(x)
    if dense is None:
        return Print(_fingerprint_of_bits(x))
    dense = dense.detach()
    ints, floats = kernels.measured(dense, fingerprint=True)
    nan, pos_inf, neg_inf = (int(ints[i]) for i in (at.NAN, at.POS_INF, at.NEG_INF))
    fingerprint = int(ints[at.FINGERPRINT]) & _UNSIGNED
    if int(ints[at.NUMEL]) == nan + pos_inf + neg_inf:
        return Print(fingerprint, nan, pos_inf, neg_inf)
    amax, total, squares = (float(floats[i]) for i in (at.AMAX, at.SUM, at.SUM_SQ))
    return Print(fingerprint, nan, pos_inf, neg_inf, amax, total, squares, sketch_of(dense))


def _fingerprint_of_bits(x: Tensor) -> int | None:
    """Return the fingerprint of an integer or Boolean tensor; None if its memory cannot be read."""
    if type(x) not in tensor_leaves.EXACT or x.layout is not torch.strided or x.is_meta or x.is_quantized:
        return None
    if x.is_nested or x.is_floating_point() or x.is_complex():
        return None
    if not x.numel() or tensor_leaves.is_batched(x) or x._is_zerotensor() or not x.untyped_storage().nbytes():
        return None
    if torch._C._functorch.maybe_current_level() is not None or x.element_size() not in _BITS:
        return None
    ints, _ = kernels.measured(x.detach().view(_BITS[x.element_size()]), fingerprint=True)
    return int(ints[at.FINGERPRINT]) & _UNSIGNED


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
    return total.tolist()


@functools.cache
def _tile_signs(device: torch.device) -> Tensor:
    return torch.from_numpy(sketch.tile_signs().copy()).to(device)


#: Maximum number of ops per step, and of rows: each takes about 1 kB of memory until the step ends.
MAX_OPS: Final = 20_000
MAX_TENSORS: Final = 1 << 16
#: Maximum length of a name or a source line, in characters.
_MAX_TEXT: Final = 1000
#: Maximum length of a list among an op's settings.
_MAX_LIST: Final = 16

#: An operand: the name of its argument, and the tensor.
Operand = tuple[str | None, Tensor]


#: The columns of one operand or result.
Read = dict[str, Any]


class OpTable:
    """Collects the rows of one step.

    Args:
        targets: names the memory of weights.
        redact: whether to leave source text out.

    Attributes:
        ops: number of ops so far; the index of the next one.
        rows: number of rows.
        columns: all rows, by column.
        full: whether something was left out.
    """

    def __init__(self, targets: Targets, *, redact: bool) -> None:
        self._targets, self._redact = targets, redact
        self.ops = self.rows = 0
        self.full = False
        self.columns: dict[str, list[Any]] = {}
        #: The op that wrote to a tensor's memory last.
        self._writers: Notes[int] = Notes()

    def begin(self, operands: Sequence[Operand]) -> tuple[int, list[Read]]:
        """Return the index of an op that is about to run, and the columns of its operands."""
        index = self.ops
        self.ops += 1
        self.full = self.full or self.ops >= MAX_OPS or self.rows + len(operands) >= MAX_TENSORS
        return index, [] if self.full else [self._read(argument, x) for argument, x in operands if x.numel()]

    def end(
        self,
        index: int,
        reads: Iterable[Read],
        results: Sequence[Tensor],
        op: str,
        phase: str,
        where: Where,
        settings: str | None = None,
        micro_step: int = 0,
    ) -> None:
        """Add the rows of an op that has run; the arguments are named after the table's columns."""
        if self.full or self.rows + len(results) >= MAX_TENSORS:
            self.full = True
            return
        line = where.line
        head = {
            "micro_step": micro_step,
            "index": index,
            "op": shortened(op, _MAX_TEXT),
            "phase": phase,
            "root": shortened(where.root, _MAX_TEXT),
            "module": shortened(where.module, _MAX_TEXT),
            "file": shortened(line.shown, _MAX_TEXT) if line is not None else None,
            "line": line.number if line is not None else None,
            "code": shortened(line.code, _MAX_TEXT) if line is not None and line.code and not self._redact else None,
            "settings": settings,
        }
        self._append(head, "in", reads)
        self._append(head, "out", [self._read(None, x, made=True) for x in results if x.numel()])
        for x in results:
            self._writers.put(x, index)

    def _read(self, argument: str | None, x: Tensor, *, made: bool = False) -> Read:
        """Measure a tensor: the columns of an operand, or of a result (``made``), which has no producer."""
        key = None if made else storage_key(x)
        producer = self._writers.at(key) if key is not None else None
        target = self._targets.of(key) if key is not None and producer is None else {}
        name = target.get("name") if target.get("target") in ("weight", "average") else None
        return {
            "argument": argument,
            "name": shortened(name, _MAX_TEXT) if name is not None else None,
            "producer": producer,
            "dtype": dtype_name(x.dtype),
            "shape": list(x.shape),
            "numel": x.numel(),
            **print_of(x)._asdict(),
        }

    def _append(self, head: dict[str, Any], side: str, tensors: Iterable[Read]) -> None:
        """Add a row per tensor on one ``side`` (in | out) of an op."""
        for position, x in enumerate(tensors):
            for name, value in {**head, "side": side, "position": position, **x}.items():
                self.columns.setdefault(name, []).append(value)
            self.rows += 1


def settings_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    """Return an op's arguments that are numbers, dtypes or short lists of numbers, as JSON; None without any."""
    found = {}
    for name, value in named_arguments(func, args, kwargs):
        plain = plain_setting(value)
        if plain is None or (isinstance(plain, list) and len(plain) > _MAX_LIST):
            continue
        found[name] = plain if not isinstance(plain, float) or math.isfinite(plain) else str(plain)
    return shortened(json.dumps(found, default=str), _MAX_TEXT) if found else None
