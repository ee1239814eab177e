"""What surrounds a replay in a wide format: weights, buffers and arguments widened, nothing set to round in between.

Everything is put aside, never written to: the training's own parameters, buffers and attributes are not touched.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from precdoctor.recording.model import static, tensor_leaves
from precdoctor.recording.scene.state_restore import Autocast
from precdoctor.recording.shadowing.replay_walks import wider

#: What ``mapped`` goes into.
_NESTS = frozenset((list, tuple, dict))


@contextlib.contextmanager
def attributes_aside(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, tensors that modules hold as plain attributes (memory banks, caches) are copies."""
    held = []
    machinery = set(vars(nn.Module()))
    try:
        for module in modules:
            for name, value in list(static.module_dict(module).items()):
                if (
                    name not in machinery
                    and (copied := tensor_leaves.mapped(value, _copy)) is not value
                    and _holds(value)
                ):
                    held.append((module, name, value))
                    static.module_dict(module)[name] = copied
        yield
    finally:
        for module, name, value in held:
            static.module_dict(module)[name] = value


def _copy(x: Tensor) -> Tensor:
    return x if issubclass(type(x), nn.Parameter) else x.detach().clone().requires_grad_(x.requires_grad)


def _holds(value: Any) -> bool:
    """Whether a plain attribute is, or holds, a tensor that is no parameter."""
    kind = type(value)
    if issubclass(kind, Tensor):
        return not issubclass(kind, nn.Parameter)
    return kind in _NESTS and any(map(_holds, value.values() if kind is dict else value))


@contextlib.contextmanager
def widened_state(modules: Sequence[nn.Module], wide: torch.dtype) -> Iterator[dict[int, nn.Parameter]]:
    """Inside, modules have widened parameters and buffers; gives those of the parameters by the original's ``id``."""
    held = [
        (
            m,
            dict(static.held(m, "_parameters")),
            dict(static.held(m, "_buffers")),
            static.module_dict(m).get("_flat_weights"),
        )
        for m in modules
    ]
    made: dict[int, nn.Parameter] = {}
    buffers: dict[int, Tensor] = {}
    try:
        for module, parameters, own_buffers, flat in held:
            for name, p in parameters.items():
                if p is not None and (p.is_floating_point() or p.is_complex()):
                    if id(p) not in made:
                        value = p.detach().to(wider(p.dtype, wide))
                        made[id(p)] = nn.Parameter(value, requires_grad=p.requires_grad)
                    static.held(module, "_parameters")[name] = made[id(p)]
            for name, b in own_buffers.items():
                if b is not None and (b.is_floating_point() or b.is_complex()):
                    static.held(module, "_buffers")[name] = buffers.setdefault(id(b), b.to(wider(b.dtype, wide)))
            if type(flat) is list:  # recurrent networks keep a second list of their parameters
                static.module_dict(module)["_flat_weights"] = [made.get(id(p), p) for p in flat]
        yield made
    finally:
        for module, parameters, own_buffers, flat in held:
            static.held(module, "_parameters").update(parameters)
            static.held(module, "_buffers").update(own_buffers)
            if type(flat) is list:
                static.module_dict(module)["_flat_weights"] = flat


@contextlib.contextmanager
def full_precision(state: Sequence[Autocast]) -> Iterator[None]:
    """Inside, autocast is off, casts are not cached, and FP32 products are computed in FP32."""
    off = [Autocast(s.device, False, s.dtype, False) for s in state]
    before = torch.get_float32_matmul_precision()
    cudnn = torch.backends.cudnn.allow_tf32 if torch.cuda.is_available() else False
    cached = torch.is_autocast_cache_enabled()
    try:
        if before != "highest":
            torch.set_float32_matmul_precision("highest")
        if cudnn:
            torch.backends.cudnn.allow_tf32 = False
        torch.set_autocast_cache_enabled(False)
        with Autocast.again(off):
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        if cudnn:
            torch.backends.cudnn.allow_tf32 = cudnn
        if before != "highest":
            torch.set_float32_matmul_precision(before)


def reduced_products() -> str | None:
    """``tf32`` where the settings let FP32 products be computed with its ten mantissa bits."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32 else None


@contextlib.contextmanager
def nothing_recomputed() -> Iterator[None]:
    """Inside, activation checkpointing keeps what it would recompute: both give the same values."""
    place: Any = sys.modules.get("torch.utils.checkpoint")
    names = ("CheckpointFunction", "_checkpoint_without_reentrant_generator")
    held = {name: getattr(place, name) for name in names if hasattr(place, name)}
    try:
        if names[0] in held:
            place.CheckpointFunction = _Plain
        if names[1] in held:
            place._checkpoint_without_reentrant_generator = _plain_generator
        yield
    finally:
        for name, value in held.items():
            setattr(place, name, value)


class _Plain:
    """Stands in for reentrant checkpointing."""

    @staticmethod
    def apply(function: Any, _preserve: bool, *args: Any) -> Any:
        return function(*args)


def _plain_generator(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    """Stands in for checkpointing that does not re-enter: nothing before the forward, nothing after it."""
    yield
