"""Detects cancellation: differences of rounded numbers that consist of little more than rounding errors.

Data and what is made of it (by casts, concatenation, running sums, arithmetic without a gradient) is followed in FP64
from before its first rounding on, by storage.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from precdoctor.numerics.nonfinite import op_names
from precdoctor.recording.deepscan.effects import Effects
from precdoctor.recording.deepscan.rounded_data import COARSE, RUNNING, TURNS, follow_coarse, note_angles
from precdoctor.recording.deepscan.scan_facts import Event, Findings, worst
from precdoctor.recording.deepscan.scanned_op import HALF, Call
from precdoctor.recording.ops.dispatched_ops import storage_key, tensors_in
from precdoctor.recording.ops.storage_notes import Notes
from precdoctor.recording.ops.tensor_facts import dtype_name

#: By format rounded to: the source formats that are wide enough to serve as exact.
_WIDER = {
    **dict.fromkeys(HALF, frozenset((torch.float32, torch.float64))),
    torch.float32: frozenset((torch.float64, torch.int64, torch.int32)),
}
#: Maximum number of elements followed, and of elements of one tensor that no cast has made.
_MAX_SOURCES, _MAX_MADE = 1 << 22, 1 << 18
#: Ops that round to half by themselves, and all ops through which data is followed.
_ROUNDS = RUNNING | op_names("add sub mul div")
_CARRIES = _ROUNDS | op_names(
    "_to_copy clone cat stack index index_select gather where neg abs flip roll repeat floor trunc ceil mean "
    "constant_pad_nd reflection_pad1d replication_pad1d masked_fill tril triu rsub"
)
#: Ops that subtract two numbers, or the integer part of one.
_SUBTRACTS = op_names("sub rsub add frac remainder fmod")
#: Ops that subtract a mean internally.
_CENTRES = op_names("native_layer_norm native_batch_norm native_group_norm")
#: Ops whose result may be close to a constant in a difference: ``1 - sigmoid(x)``, ``exp(x) - 1``.
_NEXT_TO = op_names("sigmoid tanh exp _softmax softmax cos sum mean prod div mul mm bmm pow sqrt erf")
#: FP32 ops that make the terms of an expanded difference (``x^2 - 2 x y + y^2``) from data. Such a difference is noted
#: here only if something is chosen by it, or each is paired with each; :mod:`sums` follows those of moments.
_EXPANDS = op_names("mm bmm sum mean pow mul")
_PAIRS = op_names("mm bmm")
_CHOOSES = op_names("topk sort argsort argmin argmax kthvalue")
_MAX_PENDING = 64
#: Ops allowed between a difference and the choice.
_KEEPS = op_names("neg abs sqrt clamp clamp_min")
#: Ops that round, carry, subtract or choose data.
FOLLOWED = TURNS | _CARRIES | _EXPANDS | _CHOOSES | _KEEPS | _SUBTRACTS | _CENTRES | {"copy_", "sub_"}
#: Ops of loss code whose rounded result is followed: probabilities, their logarithms, sums, products.
_REDUCES = op_names("sum mean _log_softmax _softmax log exp sigmoid log_sigmoid_forward mm bmm")
#: Relative error from which on a difference is noise; for a column, of its L2 norm.
_NOISE, _COLUMN = 0.5, 0.25
#: Differences below this share of their operands are left out: FP32 rounding, as between two copies of a model.
_RESOLVED = 2.0**-20
#: Above this FP32 holds no odd integers.
_WHOLE = 2.0**24
#: Fewest rows for which the columns of a matrix are judged separately: features of different kinds.
_ROWS = 16


@dataclass
class _Source:
    """The numbers behind a rounded tensor, in the layout of its memory.

    Attributes:
        dtype: the coarsest format that they went through.
        is_copy: whether ``exact`` is a copy that may be written to; else a tensor of the run.
        version: of ``exact``, to see whether the run has written to it.
        expands: whether one of ``_EXPANDS`` made it in FP32.
        pairs: whether a matrix product among these made it: each with each.
        is_running_sum: whether it comes from a running sum in half, which is followed even if it has a gradient.
    """

    exact: Tensor
    dtype: torch.dtype
    is_copy: bool
    version: int | None
    expands: bool = False
    pairs: bool = False
    is_running_sum: bool = False

    @property
    def is_valid(self) -> bool:
        """Whether ``exact`` was not written to."""
        return self.version == _version(self.exact)


class Differences:
    """Keeps the numbers behind rounded tensors, and judges differences of them."""

    def __init__(self, findings: Findings, effects: Effects) -> None:
        self._findings, self._effects = findings, effects
        self._follow_coarse = functools.partial(follow_coarse, findings, effects)
        #: The last ops whose result may be close to a constant, and the versions of their operands.
        self._last_calls: deque[tuple[Call, list[int | None]]] = deque(maxlen=2)
        self._sources: Notes[_Source] = Notes()
        self._room = _MAX_SOURCES
        #: Facts about differences of expanded data, to be noted if something is chosen by them.
        self._pending: Notes[tuple[Event, dict[str, Any]]] = Notes()

    def written(self, x: Tensor) -> None:
        """Forget the numbers behind a tensor: something else was written to its memory."""
        self._sources.drop(x)

    def remember(self, call: Call) -> None:
        """Keep the numbers behind the result of an op."""
        if call.name.endswith("_"):
            if call.name == "copy_":
                self._copy(call)
            elif isinstance(call.args[0], Tensor):
                self.written(call.args[0])
            return
        result = call.results[0] if call.results else None
        if result is None or call.func.is_view or result.numel() > self._room:
            return
        exact = self._before_rounding(call, result)
        if exact is None:
            return
        exact = exact.to(result.device)  # a cast may also move the data
        if exact.stride() != result.stride():
            laid_out = torch.empty_strided(result.shape, result.stride(), dtype=exact.dtype, device=exact.device)
            exact = laid_out.copy_(exact)
        self._room -= result.numel()
        theirs = any(storage_key(x) == storage_key(exact) for x in tensors_in(call.args))
        expands = (call.name in _EXPANDS and self._only_expands(call)) or self._expanded(call)
        pairs = call.name in _PAIRS or any(source.pairs for source in self._known_sources(call))
        # A difference of two running sums is as small as their terms: what is made of it is no running sum any more.
        differs = call.name in _SUBTRACTS and sum(s.is_running_sum for s in self._known_sources(call)) > 1
        differs &= all(x.shape == result.shape for x in call.operands)  # the total minus each is one
        running, version = self._is_running_sum(call) and not differs, _version(exact)
        self._sources.put(result, _Source(exact, self._coarsest(call), not theirs, version, expands, pairs, running))

    def _is_running_sum(self, call: Call) -> bool:
        """Return whether a result is a running sum in half, or made of one (a summed-area table, a wider copy)."""
        made = call.name in RUNNING and call.results[0].dtype in HALF
        return made or any(source.is_running_sum for source in self._known_sources(call))

    def _known_sources(self, call: Call) -> list[_Source]:
        found = map(self._sources.get, call.operands)
        return [source for source in found if source is not None and source.is_valid]

    def _only_expands(self, call: Call) -> bool:
        """Return whether the result is FP32 and at most FP32 arithmetic on data has rounded the operands."""
        return call.results[0].dtype == torch.float32 and all(source.expands for source in self._known_sources(call))

    def _expanded(self, call: Call) -> bool:
        """Return whether FP32 arithmetic rounded an operand, and nothing was rounded to a coarser format."""
        return self._coarsest(call) == torch.float32 and any(source.expands for source in self._known_sources(call))

    def _coarsest(self, call: Call) -> torch.dtype:
        """Return the coarsest of the formats that the result and its operands went through."""
        known = (source.dtype for source in self._known_sources(call))
        return max((call.results[0].dtype, *known), key=lambda dtype: torch.finfo(dtype).eps)

    def _before_rounding(self, call: Call, result: Tensor) -> Tensor | None:
        """Return the exact values of a result that is followed; None if it is not."""
        name, source = call.name, call.args[0] if call.args else None
        if name == "_to_copy" and isinstance(source, Tensor) and self._source(source) is None:
            return source.detach() if source.dtype in _WIDER.get(result.dtype, ()) else None
        reduced = call.phase == "loss" and result.dtype in HALF
        reduced &= name in _REDUCES or (name in ("add", "mul") and bool(self._known_sources(call)))
        trained = (result.requires_grad or any(x.requires_grad for x in call.operands)) and name != "gather"
        expands = name in _EXPANDS and self._only_expands(call)
        if not (name in _CARRIES or expands or reduced) or (trained and not reduced and not self._is_running_sum(call)):
            return None
        sources = {id(x): found.double() for x in call.operands if (found := self._source(x)) is not None}
        rounds = (reduced or expands or (result.dtype in HALF and name in _ROUNDS)) and result.numel() <= _MAX_MADE
        rounds |= result.dtype in HALF and name in RUNNING  # of any size: whole sequences
        exact = call.again(sources) if sources or rounds else None
        return exact[0] if exact is not None else None

    def _copy(self, call: Call) -> None:
        """Keep the numbers behind a whole buffer of which a part is filled: ``buffer[i] = x``."""
        target, source = call.args[0], call.args[1]
        known = self._source(source)
        wide = known if known is not None else source
        if wide.dtype not in _WIDER.get(target.dtype, ()) or target.requires_grad:
            self.written(target)
            return
        held, size = self._sources.get(target), target.untyped_storage().nbytes() // target.element_size()
        whole = held is not None and held.is_valid and held.exact.numel() == size and held.exact.is_contiguous()
        image = held.exact.reshape(-1) if held is not None and whole else target.detach().as_strided((size,), (1,), 0)
        if held is None or not whole or not held.is_copy or image.dtype != torch.float64:
            if size > self._room:
                self.written(target)
                return
            self._room -= size
            image = image.to(torch.float64, copy=True)
        image.as_strided(target.shape, target.stride(), target.storage_offset()).copy_(wide.detach())
        running = self._is_running_sum(call)
        self._sources.put(target, _Source(image, target.dtype, True, _version(image), is_running_sum=running))

    def after(self, call: Call, is_older: Callable[[Tensor], bool]) -> None:
        """Judge an op of a forward pass, of loss code or of the script, and keep the numbers behind its result.

        In a module both operands must be data or constants: rounded from numbers without a gradient or, if in half,
        older than the window (``is_older``). In loss code rounded numbers may have gradients.
        """
        if not call.results:
            return
        if call.plain_name in _SUBTRACTS:
            if self._subtract(call, is_older) or self._note_coarse(call):
                self.written(call.results[0])  # the noise is noted once, here; later ops only inherit it
                return
            self._judge_complement(call)
        elif call.name in _CENTRES and call.args:
            self._judge_normalisation(call)
        elif call.name in _CHOOSES | _KEEPS:
            self._note_choice(call)
        elif call.name in TURNS and (source := self._source(call.args[0])) is not None:
            note_angles(self._findings, call, source, self._coarsest(call))
        self.remember(call)
        if call.phase in ("forward", "loss") and call.name in _NEXT_TO:
            self._last_calls.append((call, [_version(x) for x in call.operands]))

    def _note_coarse(self, call: Call) -> bool:
        """Note differences of FP32 data above 2^24, rounded before any scan (Unix times), if most are at most an ulp.

        Each operand may be off by half an ulp, so they carry no information. Return whether a fact was noted.
        """
        data = [x for x in call.operands if x.numel() > 1]
        result = call.results[0]
        if call.name not in ("sub", "rsub") or len(data) < 2 or result.numel() > _MAX_MADE:
            return False
        if any(x.dtype != torch.float32 or x.requires_grad or self._source(x) is not None for x in data):
            return False
        seen, largest = result.detach().abs(), torch.maximum(data[0].detach().abs(), data[1].detach().abs())
        known = torch.isfinite(largest) & (largest >= _WHOLE)
        ulp = torch.exp2(torch.floor(torch.log2(largest))) * torch.finfo(torch.float32).eps
        wrong, of = known & (seen <= ulp), int(known.sum())
        many, zeros = int(wrong.sum()), int((wrong & (seen == 0)).sum())
        if 2 * of < seen.numel() or 2 * many < of or zeros == seen.numel():  # all zero: a tensor minus itself
            return False
        facts = {"wrong": many, "of": of, "zeros": zeros, "ulp": float(ulp[known].median())}
        self._findings.add("cancellation", call, many / of, **facts, largest=float(largest[known].max()),
                           dtype="float32", rounded_before=True)  # fmt: skip
        return True

    def _judge_complement(self, call: Call) -> None:
        """Judge the difference of a constant and the result of the last ops, if these are close to each other."""
        result, tensors = call.results[0], [x for x in call.operands if x.numel() > 1]
        found = next((m for m in self._last_calls if len(tensors) == 1 and m[0].results[0] is tensors[0]), None)
        if found is None or call.plain_name not in ("sub", "rsub", "add") or result.numel() > _MAX_MADE:
            return
        maker, versions = found
        if versions != [_version(x) for x in maker.operands]:
            return
        x = call.before(tensors[0]).detach()
        close = 4 * torch.finfo(x.dtype).eps if x.dtype in (*HALF, torch.float32) else 0.0
        if 2 * int((result.detach().abs() < close * x.abs()).sum()) < result.numel():
            return
        made = maker.exact
        wide = call.again({id(tensors[0]): made[0]}) if made is not None else None
        if wide is not None:
            self._judge(call, wide[0], followed=True)

    def _judge_normalisation(self, call: Call) -> None:
        """Note a normalisation of data that was rounded before, if its mean is so large that the rounding dominates."""
        x, result = call.args[0], call.results[0]
        source = self._source(x)
        wide = call.again({id(x): source.double()}) if source is not None and not source.requires_grad else None
        if source is None or wide is None:
            return
        seen, exact = result.detach().double(), wide[0]
        known = torch.isfinite(exact) & torch.isfinite(seen) & (exact != 0)
        off = torch.where(known, (seen - exact).abs(), 0.0)
        noise = float(off.norm() / exact[known].norm()) if bool(known.any()) else 0.0
        if noise >= _NOISE:
            wrong = off > _NOISE * exact.abs()
            largest = source.double().abs().amax().expand(exact.shape)
            dtype = dtype_name(self._coarsest(call))
            self._findings.add("cancellation", call, **_measured(call, exact, wrong, known, off, largest), dtype=dtype)

    def _note_choice(self, call: Call) -> None:
        """Note a pending fact if something is chosen by its difference; else carry it on to the result."""
        for x in call.operands:
            if (pending := self._pending.get(x)) is None:
                continue
            event, measured = pending
            if call.name in _CHOOSES:
                self._findings.add_event("cancellation", event, **measured)
            else:
                self._hold_back(call.results[0], event, measured)

    def _hold_back(self, x: Tensor, event: Event, measured: dict[str, Any]) -> None:
        if self._pending.get(x) is not None or len(self._pending) < _MAX_PENDING:
            self._pending.put(x, (event, measured))

    def _subtract(self, call: Call, is_older: Callable[[Tensor], bool]) -> bool:
        """Judge a difference of tensors of which some were rounded; return whether it is noise made of data."""
        half = call.results[0].dtype in HALF
        inside, sources = call.phase != "loss" and bool(call.where.module), {}
        for x in call.operands:
            source, may_be_constant = self._source(x), half and inside and not x.requires_grad
            if source is not None and not (inside and source.requires_grad):
                sources[id(x)] = source
            elif x.numel() > 1 and (x.dtype in HALF or not half) and not (may_be_constant and is_older(x)):
                return False
        wide = call.again({k: v.double() for k, v in sources.items()}) if sources else None
        return wide is not None and self._judge(call, wide[0])

    def _judge(self, call: Call, exact: Tensor, *, followed: bool = False) -> bool:
        """Note a difference that consists mostly of rounding errors; return whether it is noise made of data."""
        result = call.results[0]
        seen, size = result.detach().double(), exact.abs()
        operands = [call.before(x).detach().double().abs().broadcast_to(size.shape) for x in call.operands]
        largest = torch.stack(operands).amax(0)
        data = not any(x.requires_grad for x in call.operands)
        dtype = self._coarsest(call)
        eps, resolved = float(torch.finfo(dtype).eps), _RESOLVED if dtype in HALF else _RESOLVED**2
        known = torch.isfinite(size) & (size > resolved * largest) & torch.isfinite(seen)
        off = torch.where(known, (seen - exact).abs(), 0.0)
        wrong = known & (off > _NOISE * size) & (size < 2 * eps * largest)
        if not bool(wrong.any()):
            return self._is_running_sum(call) and self._follow_coarse(call, exact, known, off, largest, dtype)
        expands = self._expanded(call) and not followed
        model = call.phase in ("forward", "loss")
        if expands and model and any(s.pairs for s in self._known_sources(call)):  # Sums follows those of moments
            self._follow(call, exact, wrong, known, off, largest, dtype, pairs=True)
        all_wrong, all_known = wrong, known
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
            wrong, known = all_wrong, all_known
            if not data or off.norm() < COARSE * size[known].norm():
                return self._is_running_sum(call) and self._follow_coarse(call, exact, known, off, largest, dtype)
        if followed:
            self._follow(call, exact, wrong, known, off, largest, dtype)
            return False
        measured = _measured(call, exact, wrong, known, off, largest) | {"dtype": dtype_name(dtype)}
        if expands:
            self._hold_back(result, self._findings.event_of(call), measured)
            return False
        self._findings.add("cancellation", call, **measured)
        return bool(measured["of_data"]) and measured["noise"] >= COARSE

    def _follow(self, call: Call, exact: Tensor, wrong: Tensor, known: Tensor, off: Tensor, largest: Tensor,
                dtype: torch.dtype, *, pairs: bool = False) -> None:  # fmt: skip
        """Follow the wrong elements of a difference to their effect."""
        measured = _measured(call, exact, wrong, known, off, largest)
        measured |= {"dtype": dtype_name(dtype), "of_data": False}
        if pairs and wrong.dim() > 1:  # of many distances the few small ones decide: count rows with a wrong one
            measured |= {"rows": wrong[..., 0].numel(), "rows_wrong": int(wrong.any(-1).sum())}
        right, weight = torch.where(wrong, exact, call.results[0].detach().double()), measured.pop("weight")
        self._effects.begin("cancellation", self._findings.event_of(call), weight, call.results[0], right, **measured)

    def _source(self, x: Tensor) -> Tensor | None:
        """Return the numbers behind a tensor or the tensor it is a view of; None if unknown."""
        found = self._sources.get(x)
        if found is None or not found.is_valid:
            return None
        exact = found.exact
        return exact.as_strided(x.shape, x.stride(), exact.storage_offset() + x.storage_offset())


def _measured(call: Call, exact: Tensor, wrong: Tensor, known: Tensor, off: Tensor, largest: Tensor) -> dict[str, Any]:
    seen, size = call.results[0].detach().double(), exact.abs()
    many, of = int(wrong.sum()), int(known.sum())
    return {
        "weight": many / of,
        "bits_lost": float(torch.log2(largest[wrong] / size[wrong]).median()),
        "wrong": many,
        "of": of,
        "zeros": int((wrong & (seen == 0)).sum()),
        "noise": float(off[known].norm() / size[known].norm()),
        "of_data": not any(x.requires_grad for x in call.operands) or call.name in _CENTRES,
        **worst(wrong, size, seen, exact),
        "rounded_before": True,
    }


def _version(x: Tensor) -> int | None:
    """Return how often a tensor was written to; None in inference mode, which does not count."""
    return None if x.is_inference() else x._version
