"""A replay in a wide format: weights, buffers and arguments are widened, and every op computes wide.

The training's own parameters, buffers and attributes are set aside and never written to. Ops are widened one by one
below autograd and autocast, so this also reaches what no setting turns off: ``x.half()`` in a forward,
``torch.zeros(..., dtype=torch.bfloat16)`` to accumulate in, an autocast region that a framework opens.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from precdoctor.recording.model import static
from precdoctor.recording.ops.dispatched_ops import DRAWS, OpByOp, op_name, tensors_in, written_by
from precdoctor.recording.process import attach
from precdoctor.recording.scene.state_restore import Autocast
from precdoctor.recording.shadowing.replay_walks import wider

#: Bits per number; formats that are not listed have 8 or fewer.
_BITS = {torch.float64: 64, torch.float32: 32, torch.float16: 16, torch.bfloat16: 16}


class RefusedError(Exception):
    """The replay would leave traces, or not be the same computation."""


class _Mode(OpByOp):
    """Base class of modes that run ops in a replay; refuses ops that draw from a generator of their own."""

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Refuse an op, decompose it, or compute it."""
        if kwargs.get("generator") is not None:
            raise RefusedError("its forward pass draws from a random number generator of its own")
        if torch.Tag.nondeterministic_seeded in func.tags and func._can_decompose():
            with self:  # dropout that torch has not decomposed: decompose it, so that its mask is seen and reused
                return func.decompose(*args, **kwargs)
        return self.compute(func, args, kwargs)

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one op."""
        raise NotImplementedError


class Watching(_Mode):
    """Notes in which floating-point formats ops compute, and keeps what random ops return.

    Attributes:
        dtypes: of results, without those of views.
        draws: names of random ops and copies of their results, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()
        self.draws: list[tuple[str, tuple[Tensor, ...]]] = []

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if not func.is_view:
            self.dtypes.update(x.dtype for x in tensors_in(result) if x.is_floating_point())
        if _draws(func):
            self.draws.append((op_name(func), tuple(x.detach().clone() for x in tensors_in(result))))
        return result


class Widened(_Mode):
    """Makes floating-point ops compute in ``wide``, and random ops return what they returned in the watched replay.

    Attributes:
        same_draws: whether every random op was there in the watched replay, with results of the same shape.
    """

    def __init__(self, wide: torch.dtype, draws: list[tuple[str, tuple[Tensor, ...]]]) -> None:
        super().__init__()
        self.wide = wide
        self._draws = iter(draws)
        self.same_draws = True

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kept = set(map(id, written_by(func, args, kwargs)))
        widen = not func.is_view
        args = tuple(self._widened(a, kept, widen=widen) for a in args)
        kwargs = {k: self._widened(v, kept, widen=widen) for k, v in kwargs.items()}
        result = func(*args, **kwargs)
        return self._as_drawn(func, args, result) if _draws(func) else result

    def _widened(self, value: Any, kept: set[int], *, widen: bool) -> Any:
        if isinstance(value, Tensor):
            return value.to(self.wide) if widen and id(value) not in kept and self.narrower(value.dtype) else value
        if isinstance(value, torch.dtype):
            return self.wide if self.narrower(value) else value
        if type(value) in (list, tuple):
            return type(value)(self._widened(v, kept, widen=widen) for v in value)
        return value

    def narrower(self, dtype: torch.dtype) -> bool:
        """Return whether a floating-point format has fewer bits than the wide one."""
        return dtype.is_floating_point and _BITS.get(dtype, 8) < _BITS[self.wide]

    def _as_drawn(self, func: Any, args: tuple[Any, ...], result: Any) -> Any:
        """Return the result of a random op with the recorded draw in place of its own."""
        name, drawn = next(self._draws, ("", ()))
        mine = tuple(tensors_in(result))
        if name != op_name(func) or [x.shape for x in drawn] != [x.shape for x in mine]:
            self.same_draws = False
            return result
        if name == "native_dropout":
            x, p, train = args[:3]
            kept = drawn[1].to(x.dtype)
            return (x * kept / max(1.0 - p, 1e-12) if train is not False else x), drawn[1]
        if func._schema.arguments and func._schema.arguments[0].alias_info is not None:
            return mine[0].copy_(drawn[0])
        return drawn[0].to(mine[0].dtype)


def _draws(func: Any) -> bool:
    """Return whether an op is a random one whose result can be replaced by a recorded draw."""
    return torch.Tag.nondeterministic_seeded in func.tags and op_name(func) in DRAWS


@contextlib.contextmanager
def widened_state(modules: Sequence[nn.Module], wide: torch.dtype) -> Iterator[dict[int, nn.Parameter]]:
    """Widen parameters and buffers inside the context; yields the widened parameters by the original's ``id``."""
    made: dict[int, nn.Parameter] = {}
    buffers: dict[int, Tensor] = {}
    with contextlib.ExitStack() as aside:
        for module in modules:
            parameters, own_buffers = static.held(module, "_parameters"), static.held(module, "_buffers")
            for own in (parameters, own_buffers):
                aside.callback(own.update, dict(own))
            for name, p in parameters.items():
                if p is not None and (p.is_floating_point() or p.is_complex()):
                    if id(p) not in made:
                        value = p.detach().to(wider(p.dtype, wide))
                        made[id(p)] = nn.Parameter(value, requires_grad=p.requires_grad)
                    parameters[name] = made[id(p)]
            for name, b in own_buffers.items():
                if b is not None and (b.is_floating_point() or b.is_complex()):
                    own_buffers[name] = buffers.setdefault(id(b), b.to(wider(b.dtype, wide)))
            attributes = static.module_dict(module)
            if type(flat := attributes.get("_flat_weights")) is list:  # recurrent networks list their parameters again
                aside.callback(attributes.update, _flat_weights=flat)
                attributes["_flat_weights"] = [made.get(id(p), p) for p in flat]
        yield made


@contextlib.contextmanager
def full_precision(state: Sequence[Autocast]) -> Iterator[None]:
    """Turn autocast off inside the context, with its cache, and compute FP32 products in FP32."""
    off = [Autocast(s.device, False, s.dtype, False) for s in state]
    cached = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_cache_enabled(False)
        with _full_products(), Autocast.again(off):
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)


@contextlib.contextmanager
def _full_products() -> Iterator[None]:
    """Compute FP32 products in FP32 inside the context."""
    older = _older_switches()
    newer = [] if older is not None else _reduced_kinds()
    matmul, cudnn = older or ("highest", False)
    try:
        for kind, _ in newer:
            kind.fp32_precision = "ieee"
        if matmul != "highest":
            torch.set_float32_matmul_precision("highest")
        if cudnn:
            torch.backends.cudnn.allow_tf32 = False
        yield
    finally:
        if cudnn:
            torch.backends.cudnn.allow_tf32 = cudnn
        if matmul != "highest":
            torch.set_float32_matmul_precision(matmul)
        for kind, was in newer:
            kind.fp32_precision = was


def _older_switches() -> tuple[str, bool] | None:
    """Return ``float32_matmul_precision`` and cuDNN's ``allow_tf32``; None if the script uses ``fp32_precision``.

    Torch then refuses to read the older switches.
    """
    try:
        cudnn = torch.cuda.is_available() and torch.backends.cudnn.allow_tf32
        return torch.get_float32_matmul_precision(), cudnn
    except RuntimeError as error:
        attach.let_through(error)
        return None


def _reduced_kinds() -> list[tuple[Any, str]]:
    """Return the kinds of products whose ``fp32_precision`` is reduced, with the value to restore."""
    backends: Any = torch.backends
    found = [(kind, str(kind.fp32_precision)) for kind in (backends.cudnn.conv, backends.cudnn.rnn)]
    for kind, parent in ((backends.cuda.matmul, backends.cudnn), (backends.mkldnn.matmul, backends.mkldnn)):
        inherited = kind.fp32_precision == parent.fp32_precision
        found.append((kind, "none" if inherited else str(kind.fp32_precision)))
    return [(kind, was) for kind, was in found if kind.fp32_precision not in ("ieee", "none")]


def reduced_products() -> str | None:
    """Return ``tf32`` if CUDA is in use and may compute FP32 products with TF32's ten mantissa bits; else None."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    if (older := _older_switches()) is None:
        return "tf32" if any(kind.fp32_precision == "tf32" for kind, _ in _reduced_kinds()) else None
    return "tf32" if older[1] or torch.backends.cuda.matmul.allow_tf32 else None


@contextlib.contextmanager
def nothing_recomputed() -> Iterator[None]:
    """Let activation checkpointing keep what it would recompute, inside the context; the values are the same."""
    place: Any = sys.modules.get("torch.utils.checkpoint")
    names = ("CheckpointFunction", "_checkpoint_without_reentrant_generator")
    held = {name: getattr(place, name) for name in names if hasattr(place, name)}
    try:
        if names[0] in held:
            place.CheckpointFunction = _NoCheckpoint
        if names[1] in held:
            place._checkpoint_without_reentrant_generator = _no_checkpoint
        yield
    finally:
        for name, value in held.items():
            setattr(place, name, value)


class _NoCheckpoint:
    """Replaces reentrant checkpointing: runs the function."""

    @staticmethod
    def apply(function: Any, _preserve: bool, *args: Any) -> Any:
        return function(*args)


def _no_checkpoint(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    """Replaces non-reentrant checkpointing: does nothing before or after the forward."""
    yield
