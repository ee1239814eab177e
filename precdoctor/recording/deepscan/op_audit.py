"""Detects states that do not move although they should: a damage that stays inside finite numbers.

There is one measure, whatever the code looks like. A tensor that is older than the window is written to, or replaced by
what was computed from it; in FP64 it changes, and its bits stay. Large tensors are judged on a strided sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from precdoctor.numerics.nonfinite import op_names
from precdoctor.recording.deepscan.scan_facts import Event, Findings
from precdoctor.recording.deepscan.scanned_op import FLOATS, HALF, Call
from precdoctor.recording.deepscan.targets import Targets
from precdoctor.recording.ops.dispatched_ops import DRAWS, storage_key, tensors_in
from precdoctor.recording.ops.source_lines import line_columns
from precdoctor.recording.ops.storage_notes import Notes
from precdoctor.recording.ops.tensor_facts import dtype_name
from precdoctor.recording.process import attach

_UPDATES = op_names("add sub mul div lerp addcmul addcdiv copy")
#: Ops through which a state is followed; a cast changes no value in FP64, so it is followed too.
CHAINS = (_UPDATES - {"copy"}) | {"_to_copy", "clone", "rsub"}
#: Ops that make random numbers for stochastic rounding; dropout is not one, it makes masks.
_NOISE = DRAWS - {"native_dropout"}
#: Maximum number of elements of a tensor that are compared.
_SAMPLE = 4096
#: Changes below this share of a value are rounding errors of the FP64 arithmetic itself.
_MOVES = 2.0**-44
#: A state counts as stalled from this share of unchanged elements on, among those that should change.
_STALLED = 0.5
#: A line is noted if stalled states hold this share of the elements it should change: it may write two moments.
_OF_PLACE = 0.25
#: From here on adding 1 to an FP32 number changes nothing.
_FP32_COUNT = 2.0**24
#: Maximum number of chains and of casts followed per scan; of stalls noted.
_MAX_CHAINS, _MAX_STALLED = 2048, 512


@dataclass
class _Chain:
    """A tensor computed from states by a chain of ops: its FP64 value, and the states' earlier values by storage."""

    exact: Tensor
    origins: list[tuple[StorageWeakRef, int, Tensor]]
    event: Event


@dataclass
class Stall:
    """One write to a state: how many elements should have changed, and how many did not."""

    key: int
    event: Event
    data: dict[str, Any] = field(default_factory=dict)
    #: If the state was replaced by another tensor: the storages of both.
    new: StorageWeakRef | None = None
    old: StorageWeakRef | None = None


class Audit:
    """Compares states with their FP64 values over one scan; :meth:`finish` notes those that stalled."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._born: set[int] = set()
        #: Random numbers and tensors computed from them, by storage. A state to which they are added is rounded
        #: stochastically, so that most of its elements stay in any one step.
        self._random: set[int] = set()
        self._chains: Notes[_Chain] = Notes()
        self._stalls: list[Stall] = []
        #: 16-bit states that were written to: sample before the first write, FP64 value, sample after the last write.
        self._written: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        #: By storage of a wide tensor: the 16-bit state copied from it, how that stalled, a sample of the wide tensor.
        self._rounded: dict[int, tuple[int, dict[str, Any], Tensor]] = {}
        self._compensated: set[int] = set()
        #: The product of the numbers that a state was multiplied by, the largest of them, and the op of that one.
        self._factors: dict[int, tuple[float, float, Event]] = {}

    def note_new(self, name: str, result: Any) -> None:
        """Note memory that the window has seen being made: no state from before."""
        for x in tensors_in(result):
            if (key := storage_key(x)) is not None:
                self._born.add(key)
                (self._random.add if name in _NOISE else self._random.discard)(key)

    def is_older(self, x: Tensor) -> bool:
        """Return whether a tensor's memory is older than the window."""
        key = storage_key(x)
        return key is not None and key not in self._born

    # --- states ------------------------------------------------------------------------------------------------------

    def before(self, name: str, args: Any, kwargs: Any) -> list[Tensor | None]:
        """Return samples of the tensors that an in-place op is about to write to, in order; None if not followed."""
        items, known = [target for target, _, _ in _items(name, args, kwargs)], _plain(name) in _UPDATES
        for x in items:
            if not known or x.dtype not in FLOATS:  # it may write to a state's bits: stochastic rounding
                self._chains.drop(x)
            if name in _NOISE:
                self._random.add(storage_key(x) or 0)
        if not known:
            return []
        followed = (x.dtype in FLOATS and (self.is_older(x) or self._chains.get(x) is not None) for x in items)
        return [_sample(x) if follows else None for x, follows in zip(items, followed, strict=True)]

    def updated(self, call: Call, old: list[Tensor | None]) -> None:
        """Compare the states that an in-place op has written to with their FP64 values.

        Args:
            old: as :meth:`before` has returned it.
        """
        where = call.where
        for (target, given, named), was in zip(_items(call.name, call.args, call.kwargs), old, strict=True):
            if was is None or len(self._stalls) >= _MAX_STALLED:
                continue
            event = {"root": where.root, "module": where.module, "op": call.op, **line_columns(where.line)}
            event["data"] = {"phase": call.phase, "micro_step": call.micro_step, **where.calling}
            key, plain, by = storage_key(target) or 0, _plain(call.name), given[0] if given else None
            comes_from = plain != "copy" or (self._comes_from(given[0], target) and not self._is_random(given[0]))
            exact = self._run(plain + "_", was.double(), target, given, named) if comes_from else None
            now = _sample(target)
            if plain == "copy" and isinstance(by, Tensor):
                self._follow_copy(key, by, was, now, event)
            self._follow(plain, target, given, named, event)
            if exact is not None and (by is target or (plain in ("mul", "div") and _is_number(by))):
                self._note_factor(key, float((exact / was.double()).nanmedian()), event)
            if exact is None or not self.is_older(target):
                continue  # a fresh copy: the wider tensor that it is copied from holds what it lacks
            found = [_stall_of(was, now, exact), self._joint_stall(key, plain, was, now, exact, (target, given, named))]
            self._stalls += [Stall(key, event, data) for data in found if data is not None]

    def _note_factor(self, key: int, factor: float, event: Event) -> None:
        product, most, by = self._factors.get(key, (1.0, 1.0, event))
        if key in self._factors or len(self._factors) < _MAX_CHAINS:
            self._factors[key] = product * factor, max(most, factor), event if factor > most else by

    def _follow_copy(self, key: int, x: Tensor, was: Tensor, now: Tensor, event: Event) -> None:
        """Follow a 16-bit copy of a wider state: if that is filled from the copy later, it loses what the copy lost."""
        source, known = storage_key(x) or 0, self._rounded.pop(key, None)
        if known is not None and known[0] == source and torch.equal(known[2], was):
            self._stalls.append(Stall(source, event, known[1]))
        if was.dtype in HALF and x.dtype == torch.float32 and self.is_older(x) and len(self._rounded) < _MAX_CHAINS:
            wide = _sample(x)
            if (data := _stall_of(was, now, wide.to(now.device, torch.float64))) is not None:
                self._rounded[source] = key, data, wide

    def _follow(self, plain: str, target: Tensor, given: tuple[Any, ...], named: Any, event: Event) -> None:
        """Follow a state into a wider copy of it (``master.copy_(p)``), and follow what is then written to the copy."""
        chain = self._chains.get(target)
        self._chains.drop(target)
        if plain == "copy":
            origins = self._origins(given[0])[:2] if isinstance(given[0], Tensor) else []
            wide = target.dtype == torch.float32 and given[0].shape == target.shape if origins else False
            follows = wide and storage_key(target) not in {o[1] for o in origins}
            exact = self._value(given[0], target).to(target.device, copy=True) if follows else None
        else:
            origins = chain.origins if chain is not None else []
            exact = self._run(plain + "_", chain.exact.clone(), target, given, named) if chain is not None else None
        if exact is not None and len(self._chains) < _MAX_CHAINS:
            self._chains.put(target, _Chain(exact, origins, event))

    def _joint_stall(self, key: int, plain: str, was: Tensor, now: Tensor, exact: Tensor,
                     op: tuple[Tensor, tuple[Any, ...], Any]) -> dict[str, Any] | None:  # fmt: skip
        """Return how a 16-bit state stalled over several writes (``mean.mul_(b).add_(w)``); None if it did not."""
        if was.dtype not in HALF:
            return None
        known = self._written.pop(key, None)
        if known is None or plain == "copy" or not torch.equal(known[2], was):
            if len(self._written) < _MAX_CHAINS:
                self._written[key] = was, exact, now
            return None
        first, wide = known[0], self._run(plain + "_", known[1], *op)
        if wide is None:
            return None
        self._written[key] = first, wide, now
        data = _stall_of(first, now, wide)
        return data if data is not None and data["stalled"] >= _STALLED * data["moved"] else None

    def _comes_from(self, x: Any, target: Tensor) -> bool:
        """Return whether a tensor was computed from the state that it is copied to."""
        chain = self._chains.get(x) if isinstance(x, Tensor) else None
        return chain is not None and any(key == storage_key(target) for _, key, _ in chain.origins)

    def _is_random(self, x: Tensor) -> bool:
        return storage_key(x) in self._random

    def _run(self, name: str, x: Tensor, like: Tensor, args: tuple[Any, ...], kwargs: Any) -> Tensor | None:
        """Run an op in FP64 on samples; None if they do not fit each other."""
        try:
            given = [(x.clone() if a is like else self._value(a, like)) if isinstance(a, Tensor) else a for a in args]
            named = {k: self._value(v, like) if isinstance(v, Tensor) else v for k, v in kwargs.items()
                     if k in ("alpha", "value", "weight", "rounding_mode")}  # fmt: skip
            if name in ("addcmul_", "addcdiv_") and len(given) == 3:
                named["value"] = given.pop()
            if name == "copy_":
                given = given[:1]
            found: Tensor = getattr(x, name)(*given, **named)
        except (RuntimeError, TypeError, ValueError) as error:
            attach.let_through(error)
            return None
        return found

    def _value(self, x: Tensor, like: Tensor) -> Tensor:
        """Return the FP64 sample of an operand, exact if it was computed from states."""
        chain = self._chains.get(x)
        if chain is not None and x.shape == like.shape:
            return chain.exact
        if x.numel() == 1:
            return x.detach().reshape(()).double()
        if x.shape != like.shape:
            if like.numel() > _SAMPLE:
                raise ValueError("a sample of one is none of the other")  # broadcasting would pair the wrong elements
            x = x.expand(like.shape)
        return _sample(x).double()

    def chained(self, call: Call) -> None:
        """Follow a tensor that an op has computed from a state (``m * b + g * (1 - b)``): it may replace the state."""
        name = call.plain_name
        if name == "sub":
            self._note_compensation(call)
        if name not in CHAINS or call.name != name or not call.results or len(self._chains) >= _MAX_CHAINS:
            return
        result = call.results[0]
        key = storage_key(result)
        operands = [x for x in call.operands if x.shape == result.shape]
        if key is not None and any(map(self._is_random, operands)):
            self._random.add(key)
        origins = [o for x in operands for o in self._origins(x)][:2]
        if not origins or key is None or call.args[0].shape != result.shape:
            return
        x = self._value(call.args[0], result).to(result.device, copy=True).reshape(-1)
        if name in ("_to_copy", "clone"):
            exact: Tensor | None = x
        elif name == "rsub":
            return
        else:
            exact = self._run(name + "_", x, result, tuple(call.args[1:]), call.kwargs)
        if exact is not None:
            if name == "sub":
                self._note_remainder(operands, result, exact)
            chain = _Chain(exact, origins, self._findings.event_of(call))
            self._chains.put(result, chain)
            if result.dtype in HALF and name != "clone" and not self._is_random(result):
                self._replace(chain, key, result)

    def _origins(self, x: Tensor) -> list[tuple[StorageWeakRef, int, Tensor]]:
        """Return storages and samples of the states that a tensor was computed from; empty if there are none."""
        key = storage_key(x)
        if key is None:
            return []
        if (chain := self._chains.get(x)) is not None:
            return chain.origins
        if x.dtype in HALF and self.is_older(x):
            return [(StorageWeakRef(x.untyped_storage()), key, _sample(x))]
        return []

    def _replace(self, chain: _Chain, key: int, result: Tensor) -> None:
        """Note how a state stalls if a tensor computed from it takes its place."""
        new, storage = _sample(result), StorageWeakRef(result.untyped_storage())
        for old, _, was in chain.origins:
            fits = was.shape == new.shape and was.dtype == new.dtype and len(self._stalls) < _MAX_STALLED
            if fits and (data := _stall_of(was.to(new.device), new, chain.exact)) is not None:
                self._stalls.append(Stall(key, chain.event, data, new=storage, old=old))

    def _note_compensation(self, call: Call) -> None:
        """Exempt a state that is subtracted from something: what it did not take up may be added later (Kahan)."""
        keys = {storage_key(x) for x in call.operands if x.shape == call.results[0].shape}
        stalled = {s.key for s in self._stalls}
        self._compensated |= {k for k in keys if k in stalled and k is not None}

    def _note_remainder(self, operands: list[Tensor], result: Tensor, exact: Tensor) -> None:
        """Exempt a state whose remainder (new value less old one) is computed, but lost by rounding."""
        shared = [{key for _, key, _ in self._origins(x)} for x in operands]
        if len(shared) == 2 and (of_both := shared[0] & shared[1]):
            vanished, moves = _sample(result).reshape(-1) == 0, exact != 0
            if int((vanished & moves).sum()) >= _STALLED * max(int(moves.sum()), 1):
                self._compensated |= of_both

    # --- the end -----------------------------------------------------------------------------------------------------

    def finish(self, targets: Targets) -> None:
        """Note the stalled states and what they are, once the window is over."""
        places: dict[Any, list[tuple[Stall, dict[str, Any]]]] = {}
        for stall in self._stalls:
            target, event = targets.of(stall.key), stall.event
            if stall.new is not None and stall.new.expired():
                continue  # the new tensor was an intermediate result and has replaced nothing
            kept = stall.old is not None and not stall.old.expired()
            if kept and target["target"] != "weight" and stall.data["moved"] > 1:
                continue  # the state was kept, so nothing has replaced it; a count may be in a copy of its module
            if stall.key in self._compensated:
                continue
            place = (event["op"], event.get("file"), event.get("line"), target["target"], stall.data["dtype"])
            places.setdefault(place, []).append((stall, target))
        for found in places.values():
            still = [f for f in found if f[0].data["stalled"] >= _STALLED * f[0].data["moved"]]
            of = sum(s.data["moved"] for s, _ in found)
            moved, stalled = (sum(s.data[name] for s, _ in still) for name in ("moved", "stalled"))
            if not still or moved < _OF_PLACE * of:
                continue
            worst, target = max(still, key=lambda f: f[0].data["stalled"])
            data = {
                **worst.data,
                "moved": moved,
                "stalled": stalled,
                "of": of,
                "tensors": len({s.key for s, _ in still}),
            }
            self._findings.add_event("stalled", worst.event, stalled / moved, **data, **target)
        for key, (factor, _, event) in self._factors.items():
            if factor > 1 and (target := targets.of(key))["target"] == "weight":
                self._findings.add_event("amplified", event, factor, factor=factor, **target)
        self._stalls, self._written, self._rounded, self._factors = [], {}, {}, {}
        self._chains.clear()
        self._random.clear()


def _is_number(x: Any) -> bool:
    """Return whether an argument is a number or a CPU tensor with a single value."""
    return isinstance(x, (int, float)) or (isinstance(x, Tensor) and x.dim() == 0 and x.device.type == "cpu")


def _plain(name: str) -> str:
    """Return the name of an in-place op without ``_foreach_`` and underscore; empty for other ops."""
    return name.removeprefix("_foreach_").rstrip("_") if name.endswith("_") else ""


def _items(name: str, args: Any, kwargs: Any) -> Iterator[tuple[Tensor, tuple[Any, ...], Any]]:
    """Yield target, other arguments and keywords of an in-place op, for each item of its lists if it has any."""
    if not name.startswith("_foreach_"):
        if args and isinstance(args[0], Tensor):
            yield args[0], tuple(args[1:]), kwargs
        return
    for i, target in enumerate(args[0]):
        yield target, tuple(a[i] if isinstance(a, (list, tuple)) else a for a in args[1:]), kwargs


def _sample(x: Tensor) -> Tensor:
    """Return a flat copy of at most ``_SAMPLE`` evenly spaced elements."""
    flat = x.detach().reshape(-1)
    step = -(-flat.numel() // _SAMPLE)
    return flat[::step].clone() if step > 1 else flat.clone()


def _stall_of(was: Tensor, now: Tensor, exact: Tensor) -> dict[str, Any] | None:
    """Return how many of the elements that should change in FP64 have kept their bits; None if none should."""
    old = was.double()
    if exact.shape != old.shape or was.dtype not in FLOATS:
        return None
    move = (exact - old).abs()
    moved = torch.isfinite(exact) & torch.isfinite(old) & (move > _MOVES * old.abs()) & (move > 0)
    stayed = moved & (now == was)
    many, of = int(stayed.sum()), int(moved.sum())
    if not of:
        return None
    size = old[stayed].abs()
    if not many or (was.dtype == torch.float32 and not bool((size >= _FP32_COUNT).all())):
        return {"dtype": dtype_name(was.dtype), "moved": of, "stalled": 0}  # FP32 averages may take tiny steps
    info = torch.finfo(was.dtype)
    ulp = torch.exp2(torch.floor(torch.log2(size.clamp_min(info.tiny)))) * info.eps
    missing = torch.log2(ulp / 2 / move[stayed])
    return {
        "dtype": dtype_name(was.dtype),
        "moved": of,
        "stalled": many,
        "bits_missing": float(missing.median()),
        "value": float(size.median()),
        "move": float(move[stayed].median()),
    }
