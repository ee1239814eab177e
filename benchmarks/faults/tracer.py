"""The oracle's own tracer: follows a script's non-finite values from the op that makes them.

It shares nothing with precdoctor. Every aten op is seen, forward and backward. An op that makes a non-finite value from
finite ones gives *birth*; later tensors inherit births through the storages they are computed from. Constants that are
non-finite on purpose (the -inf of a mask) are births too, but *deliberate* ones: they do no harm until an op makes NaN
of them, and then that op is the birth.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from benchmarks.faults.modules import ModuleStack

Storage = int
_COPIES = ("aten._to_copy", "aten.copy_", "aten.lift_fresh", "aten.detach", "aten.clone", "aten.alias")


@dataclasses.dataclass(frozen=True)
class Place:
    """A line of the script or of its helper modules."""

    file: str
    line: int


@dataclasses.dataclass(frozen=True)
class Operand:
    """What went into an op."""

    dtype: str
    shape: tuple[int, ...]
    numel: int
    low: float | None
    high: float | None
    amax: float | None
    zeros: int
    nan: int
    inf: int


@dataclasses.dataclass(frozen=True)
class Birth:
    """An op that made a non-finite value of finite ones."""

    step: int
    phase: str
    op: str
    #: The op of the forward pass whose gradient this is, in the backward phase.
    forward_op: str | None
    root: str | None
    module: str | None
    place: Place | None
    operands: tuple[Operand, ...]
    result: Operand
    #: The same op on the same operands in FP64 is finite: the format's range was the limit, not the function's domain.
    finite_in_fp64: bool | None
    deliberate: bool = False
    #: A row of the operand consists of -inf only.
    masked_row: bool = False
    #: In the backward phase: the birth, in the forward pass, of a saved non-finite value that went into this op.
    saved: int | None = None


def storage_of(tensor: torch.Tensor) -> Storage:
    return int(tensor.untyped_storage()._cdata)


def floats_in(tree: Any) -> list[torch.Tensor]:
    """The floating and complex tensors among the leaves, as long as they have elements."""
    leaves = tree_flatten(tree)[0]
    return [
        x
        for x in leaves
        if isinstance(x, torch.Tensor) and x.numel() > 0 and (x.dtype.is_floating_point or x.dtype.is_complex)
    ]


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def is_bad(tensor: torch.Tensor) -> bool:
    """Whether any element is non-finite: finite FP32 values cannot overflow a sum in FP64."""
    return not math.isfinite(as_real(tensor).sum(dtype=torch.float64).item())


def describe(tensor: torch.Tensor) -> Operand:
    """Range and counts of a tensor."""
    flat = as_real(tensor).detach().double().flatten()
    finite = flat[flat.isfinite()]
    some = finite.numel() > 0
    return Operand(
        str(tensor.dtype).removeprefix("torch."),
        tuple(tensor.shape),
        tensor.numel(),
        finite.min().item() if some else None,
        finite.max().item() if some else None,
        finite.abs().max().item() if some else None,
        int((flat == 0).sum()),
        int(flat.isnan().sum()),
        int(flat.isinf().sum()),
    )


def _deliberate_constant(args: Any) -> bool:
    """A non-finite Python number among the arguments: somebody wrote it down."""
    return any(isinstance(x, float) and not math.isfinite(x) for x in tree_flatten(args)[0])


class Tracer(TorchDispatchMode):
    """See the module's text."""

    def __init__(self, directory: Path, modules: ModuleStack) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.directory, self.modules = str(directory), modules
        self.step = 0
        self.in_optimizer = False
        self.births: list[Birth] = []
        self.taint: dict[Storage, frozenset[int]] = {}
        #: Of every node of the graph: the forward op, its module and its place.
        self.made_by: dict[int, tuple[str, tuple[str, str] | None, Place | None]] = {}

    # -- one op --------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        node: Any = torch._C._current_autograd_node()  # None outside a backward pass, whatever its annotation says
        place = None
        if node is None or self.modules.stack:
            place = self._place()
            number = torch._C._autograd._get_sequence_nr() - 1
            self.made_by.setdefault(number, (name, self.modules.where(), place))
        ins = floats_in((args, kwargs))
        bad_in = [x for x in ins if is_bad(x)]
        before = {id(x): frozenset(self.taint.get(storage_of(x), ())) for x in bad_in}
        keep = (
            tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, (args, kwargs))
            if (func._schema.is_mutable and "empty" not in name)
            else (args, kwargs)
        )
        out = func(*args, **kwargs)
        written = [x for i, x in enumerate(args) if func._schema.is_mutable and i == 0]
        bad_out = [] if "empty" in name else [x for x in floats_in((out, written)) if is_bad(x)]
        if not bad_out:
            return out
        births = self._births(name, func, keep, bad_in, before, bad_out, node, place)
        for x in bad_out:
            self.taint[storage_of(x)] = births
        return out

    def _births(
        self,
        name: str,
        func: Any,
        arguments: tuple[Any, Any],
        bad_in: list[torch.Tensor],
        before: dict[int, frozenset[int]],
        bad_out: list[torch.Tensor],
        node: Any,
        place: Place | None,
    ) -> frozenset[int]:
        """Whose children the bad outputs are: those of the bad inputs, or this op's own."""
        inherited = frozenset(b for x in bad_in for b in before[id(x)])
        if not func._schema.is_mutable and storage_of(bad_out[0]) in {storage_of(x) for x in bad_in}:
            return inherited  # a view
        saved = None
        if node is not None and not self.modules.stack:  # what was non-finite in the forward pass and harmless there
            forward = [b for b in inherited if self.births[b].phase != "backward"]
            saved = min((b for b in forward if not self.births[b].deliberate), default=None)
            inherited -= frozenset(forward)
        harmful = frozenset(b for b in inherited if not self.births[b].deliberate)
        if harmful:
            return harmful
        constants = _deliberate_constant(arguments)
        new_nan = any(bool(x.isnan().any()) for x in bad_out) and not any(bool(x.isnan().any()) for x in bad_in)
        if inherited and not new_nan:
            return inherited
        deliberate = constants and not (new_nan and func._schema.arguments and "mul" in name)
        unknown = bool(bad_in) and not inherited and node is None and not new_nan
        birth = self._describe(name, func, arguments, bad_out[0], node, place, deliberate or unknown)
        birth = dataclasses.replace(birth, saved=saved)
        self.births.append(birth)
        return frozenset([len(self.births) - 1])

    def _describe(
        self,
        name: str,
        func: Any,
        arguments: tuple[Any, Any],
        out: torch.Tensor,
        node: Any,
        place: Any,
        deliberate: bool,
    ) -> Birth:
        where, forward_op = self.modules.where(), None
        if node is not None and where is None:
            phase = "backward"
            forward_op, where, place = self.made_by.get(node._sequence_nr(), (None, None, None))
        elif (self.in_optimizer and where is None) or storage_of(out) in self.modules.parameter_storages():
            phase = "optimizer"
        elif where is not None:
            phase = "loss" if self.modules.is_criterion() else "forward"
        else:
            phase = "loss" if self.modules.ran else "data"
        inputs = floats_in(arguments)
        rows = [x for x in inputs if x.dim() and bool((x == -math.inf).all(-1).any())]
        return Birth(
            self.step,
            phase,
            name,
            forward_op,
            where[0] if where else None,
            where[1] if where else None,
            place or self._place(),
            tuple(describe(x) for x in inputs[:4]),
            describe(out),
            _finite_in_fp64(name, func, arguments),
            deliberate,
            bool(rows),
        )

    def _place(self) -> Place | None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(self.directory):
                return Place(os.path.relpath(name, self.directory), frame.f_lineno)
            frame = frame.f_back
        return None

    # -- harm ----------------------------------------------------------------------------------------------------------

    def of(self, tensors: Iterable[torch.Tensor]) -> tuple[bool, Birth | None]:
        """Whether any tensor is bad, and the earliest birth it descends from."""
        bad = [x for x in tensors if x.dtype.is_floating_point and x.numel() and is_bad(x)]
        ids = sorted({b for x in bad for b in self.taint.get(storage_of(x), ())})
        harmful = [b for b in ids if not self.births[b].deliberate] or ids
        return bool(bad), self.births[harmful[0]] if harmful else None


def _finite_in_fp64(name: str, func: Any, arguments: tuple[Any, Any]) -> bool | None:
    """Run the op again on FP64 copies; None where that is not possible."""
    if name.startswith(_COPIES):
        return True

    def widen(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.dtype.is_floating_point:
            return x.double()
        return torch.float64 if isinstance(x, torch.dtype) and x.is_floating_point else x

    try:
        args, kwargs = tree_map(widen, arguments)
        out = func(*args, **kwargs)
        return not any(is_bad(x) for x in floats_in((out, args[0] if func._schema.is_mutable else ())))
    except (RuntimeError, NotImplementedError, TypeError):
        return None
