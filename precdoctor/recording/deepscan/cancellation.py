"""Differences of numbers that were cast to half before: where they cancel, what is left is the rounding of the cast."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from precdoctor.recording.deepscan.scan_facts import Findings
from precdoctor.recording.deepscan.scanned_op import Call
from precdoctor.recording.ops.dispatched_ops import storage_key

_HALF = frozenset((torch.float16, torch.bfloat16))
#: Elements of casts whose sources are kept for a difference later.
_MAX_SOURCES = 1 << 22
#: Error of a difference, relative to what it should be, from which on it is noise; and of a column, in L2.
_NOISE, _COLUMN = 0.5, 0.25
#: Rows from which on the columns of a matrix are judged one by one: features of different kinds.
_ROWS = 16


class Differences:
    """Keeps what was cast to half, and judges the differences that it goes into."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._sources: dict[int, tuple[StorageWeakRef, Tensor]] = {}
        self._room = _MAX_SOURCES

    def cast(self, call: Call) -> None:
        """Remember the source of a cast to half, of data as well."""
        result = call.results[0] if call.results else None
        if call.name != "_to_copy" or result is None or result.dtype not in _HALF:
            return
        source, key = call.args[0], storage_key(result)
        narrows = source.dtype in (torch.float32, torch.float64)
        if narrows and key is not None and source.numel() <= self._room and source.stride() == result.stride():
            self._room -= source.numel()
            self._sources[key] = StorageWeakRef(result.untyped_storage()), source.detach()

    def after(self, call: Call, lived: Callable[[Tensor], bool]) -> None:
        """An op of a forward pass or of loss code has run.

        Loss code may subtract casts of whatever was computed. In a module both must be data or constants: casts of what
        no op of the window has made, or tensors that are older than it (``lived``).
        """
        if not call.results or call.results[0].dtype not in _HALF:
            return
        self.cast(call)
        if call.name not in ("sub", "sub_", "rsub"):
            return
        inside, sources = call.phase != "loss" and bool(call.where.module), {}
        for x in call.operands:
            source = self._source(x)
            if source is not None and not (inside and source.requires_grad):
                sources[id(x)] = source
            elif x.dtype in _HALF and x.numel() > 1 and not (inside and lived(x) and not x.requires_grad):
                return
        wide = call.again({k: v.double() for k, v in sources.items()}) if sources else None
        if wide is not None:
            self._judge(call, wide[0])

    def _judge(self, call: Call, exact: Tensor) -> None:
        result = call.results[0]
        seen, size = result.detach().double(), exact.abs()
        operands = [call.before(x).detach().double().abs().broadcast_to(size.shape) for x in call.operands]
        largest = torch.stack(operands).amax(0)
        eps = float(torch.finfo(result.dtype).eps)
        known = torch.isfinite(size) & (size > 0) & torch.isfinite(seen)
        off = torch.where(known, (seen - exact).abs(), 0.0)
        wrong = known & (off > _NOISE * size) & (size < 2 * eps * largest)
        if size.dim() > 1 and size.shape[-1] > 1 and size.numel() >= _ROWS * size.shape[-1]:
            rows = [x.reshape(-1, size.shape[-1]) for x in (wrong, known, off, torch.where(known, size, 0.0))]
            noisy = rows[2].norm(dim=0) >= _COLUMN * rows[3].norm(dim=0)
            share = torch.where(noisy, rows[0].sum(0) / rows[1].sum(0).clamp_min(1), 0.0)
            column = torch.zeros_like(wrong)
            column[..., int(share.argmax())] = True
            if int((wrong & ~column).sum()) * 2 < int((known & ~column).sum()):
                wrong, known = wrong & column, known & column
        many, of = int(wrong.sum()), int(known.sum())
        if many * 2 < of or not many or off[known].norm() < _COLUMN * size[known].norm():
            return
        at = int(torch.where(wrong, size, -1.0).flatten().argmax())
        bits = torch.log2(largest[wrong] / size[wrong])
        self._findings.add(
            "cancellation", call, many / of, dtype=str(result.dtype).removeprefix("torch."),
            bits_lost=float(bits.median()), wrong=many, of=of, zeros=int((wrong & (seen == 0)).sum()),
            seen=float(seen.flatten()[at]), exact=float(exact.flatten()[at]), rounded_before=True,
        )  # fmt: skip

    def _source(self, x: Tensor) -> Tensor | None:
        """What a tensor, or the one that it is a view of, was before it was cast."""
        key = storage_key(x)
        found = self._sources.get(key) if key is not None else None
        if found is None or found[0].expired():
            return None
        return found[1].as_strided(x.shape, x.stride(), found[1].storage_offset() + x.storage_offset())
