"""The dispatch mode that observes casts, and the multiplications and clamps before them. It changes no op."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _get_current_dispatch_mode_stack

from precdoctor.recording.model import tensor_leaves
from precdoctor.recording.ops.dispatched_ops import left_to_others, something_is_compiled

if TYPE_CHECKING:
    from precdoctor.recording.fp8.cast_observer import Observer

_aten: Any = torch.ops.aten
#: Ops by how the observer handles them; every other op that writes to a tensor invalidates the notes on it.
_HANDLED: dict[str, tuple[Any, ...]] = {
    "convert": (_aten._to_copy.default, _aten.clone.default),
    "copy": (_aten.copy_.default,),
    "mul": (_aten.mul.Tensor, _aten.mul.Scalar, _aten.mul_.Tensor, _aten.mul_.Scalar),
    "div": (_aten.div.Tensor, _aten.div.Scalar, _aten.div_.Tensor, _aten.div_.Scalar),
    "clamp": (
        *(_aten.clamp.default, _aten.clamp.Tensor, _aten.clamp_.default, _aten.clamp_.Tensor),
        *(_aten.hardtanh.default, _aten.clamp_min.default, _aten.clamp_max.default),
    ),
    "bound": (_aten.minimum.default, _aten.maximum.default),
    "matmul": (_aten._scaled_mm.default,),
}
_OPS = {op: what for what, ops in _HANDLED.items() for op in ops}
if hasattr(_aten, "_scaled_mm_v2"):  # torch 2.9
    _OPS[_aten._scaled_mm_v2.default] = "matmul"


class CastMode(TorchDispatchMode):
    """Open during the code of one module call, or during one backward pass."""

    supports_higher_order_operators = True

    def __init__(self, observer: Observer) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # as torch has it
        self.observer = observer

    @property
    def is_top(self) -> bool:
        return _get_current_dispatch_mode() is self

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let functions compiled inside the mode stay compiled; their casts are not observed."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(tensor_leaves.computes_itself(t) for t in types):
            return left_to_others(func, types, args, kwargs)
        what, mutable, _ = _op_kinds.get(id(func)) or _look_up(func)
        if what is None:
            result = func(*args, **kwargs)
            if mutable:
                self.observer.written(args, kwargs)
            return result
        before = self.observer.before(what, args, kwargs)
        result = func(*args, **kwargs)
        self.observer.after(what, args, kwargs, result, before)
        return result


#: By identity of an op: how it is handled, whether it writes to an operand, and the op, which keeps the id valid. Not
#: by hash, because hashing an op takes longer than running some of them.
_op_kinds: dict[int, tuple[str | None, bool, Any]] = {}


def _look_up(func: Any) -> tuple[str | None, bool, Any]:
    schema = getattr(func, "_schema", None)  # higher-order ops have none
    found = _op_kinds[id(func)] = _OPS.get(func), schema is not None and bool(schema.is_mutable), func
    return found


def supported() -> bool:
    """Whether the mode can be open without changing what runs.

    In older versions of torch a function called under a dispatch mode is not compiled, so the mode needs a process
    without compiled functions.
    """
    return hasattr(TorchDispatchMode, "ignore_compile_internals") or not something_is_compiled()


def open_observer() -> Observer | None:
    """Return the observer of this thread's innermost mode; None without one."""
    found = [m.observer for m in _get_current_dispatch_mode_stack() if isinstance(m, CastMode)]
    return found[-1] if found else None


def is_open() -> bool:
    """Whether a mode observes this thread's ops."""
    return open_observer() is not None
