"""Replays one root call as it ran and twice in a wide format, and measures the errors of each layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from precdoctor.recording.microscope.replay import (
    copied_arguments,
    eager,
    gradients_aside,
    leaves_of,
    same_bits,
    with_gradients,
)
from precdoctor.recording.model import static, tensor_leaves
from precdoctor.recording.model.module_names import Names, unwrap
from precdoctor.recording.ops.dispatched_ops import take_gradients
from precdoctor.recording.scene.root_call import RootCall
from precdoctor.recording.scene.state_restore import Autocast, attributes_aside, buffers_aside, without_hooks
from precdoctor.recording.shadowing import wide_replay
from precdoctor.recording.shadowing.relative_errors import Layer, relative_l2
from precdoctor.recording.shadowing.replay_walks import AllTheWay, Gradients, PieceByPiece, Reduced, Walk, wider
from precdoctor.recording.shadowing.wide_replay import Watching, Widened

#: By full name: a parameter, its gradient in the reduced replay, its layer, and its name within the layer's module.
_Weights = dict[str, tuple[Tensor, Tensor, Layer, str]]


@dataclass
class Compared:
    """The comparison of one root call.

    Attributes:
        formats: floating-point formats in which its ops compute.
        layers: in order of their first call; empty if nothing was reduced.
        outputs, equal: number of root outputs still known from the run, and of those that the replay reproduces.
        backward: ``compared``; ``none`` (no gradient reached its outputs, or nothing needs one); ``overflowed`` (left
            to the loss scaler or an incident).
        same_draws: whether random ops returned the same in the reference as in the reduced replay.
    """

    call: RootCall
    formats: set[str] = field(default_factory=set)
    layers: list[Layer] = field(default_factory=list)
    outputs: int = 0
    equal: int = 0
    backward: str = "none"
    same_draws: bool = True


def compare(call: RootCall, names: Names, wide: torch.dtype) -> Compared:
    """Replay ``call`` as it ran and, if that reduced precision, in two wide walks. Only random generators change.

    Raises:
        RefusedError: a replay would leave traces.
        Exception: whatever the user's forward raises.
    """
    module = unwrap(call.module)
    named = [(n if (place := names.find(m)) is None else place.module, m) for n, m in static.named_modules(module)]
    found = {n: m for n, m in named if m is module or static.attribute(m, "inplace", False) is not True}
    while True:
        done, watching, reduced = Compared(call), Watching(), Reduced(found)
        with _isolated(call, module, Autocast.again(call.autocast)):
            weights = _run_reduced(done, watching, reduced, module, names)
        if not (in_place := {n for n, m in found.items() if n in reduced.in_place and m is not module}):
            break
        found = {n: m for n, m in found.items() if n not in in_place}
    done.formats = {str(d).removeprefix("torch.") for d in watching.dtypes}
    if (products := wide_replay.reduced_products()) is not None:
        done.formats.add(products)
    if products is None and not any(d.itemsize < wide.itemsize for d in watching.dtypes):
        return done
    for walk in (AllTheWay(found, reduced), PieceByPiece(found, reduced, wide)):
        widened = Widened(wide, watching.draws)
        with (
            _isolated(call, module, wide_replay.full_precision(call.autocast)),
            wide_replay.widened_state(static.modules(module), wide) as own,
        ):
            _run_widened(
                done, walk, widened, module, {n: (own[id(p)], g, layer, w) for n, (p, g, layer, w) in weights.items()}
            )
        done.same_draws = done.same_draws and widened.same_draws
    done.layers = sorted(reduced.layers.values(), key=lambda layer: layer.order)
    return done


@contextlib.contextmanager
def _isolated(call: RootCall, module: nn.Module, around: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    modules = static.modules(module)
    call.random.restore()
    with (
        without_hooks(modules),
        buffers_aside(modules, call.buffers),
        attributes_aside(modules),
        wide_replay.nothing_recomputed(),
        eager(),
        torch.enable_grad(),
        around,
    ):
        yield


def _run_reduced(done: Compared, mode: Watching, walk: Reduced, module: nn.Module, names: Names) -> _Weights:
    """Replay the call as the script made it; return its weights with their gradients, none if a gradient overflowed."""
    call = done.call
    args, kwargs = copied_arguments(call)
    with walk.hooked(), mode:
        result = module(*args, **kwargs)
    _count_equal(done, call, result)
    parameters = {n: p for n, p in static.named_parameters(module) if p.requires_grad}
    inputs = [*parameters.values(), *(x for _, x in leaves_of((args, kwargs)))]
    pairs = with_gradients(result, call.gradients)
    if not pairs or not inputs:
        return {}
    with gradients_aside(inputs), mode:
        gradients = _gradients(pairs, inputs)
    if not all(bool(torch.isfinite(g).all()) for g in gradients if g is not None and g.layout is torch.strided):
        done.backward = "overflowed"
        walk.input_gradients.clear()
        walk.output_gradients.clear()
        return {}
    done.backward = "compared"
    weights: _Weights = {}
    for (full, p), grad in zip(parameters.items(), gradients, strict=False):
        if grad is None or grad.layout is not torch.strided:
            continue
        place = names.parameter(p)
        owner, own = (
            (full.rpartition(".")[0], full.rpartition(".")[2]) if place is None else (place[0].module, place[1])
        )
        kind = "" if place is None else place[0].module_class
        layer = walk.layers.setdefault(owner, Layer(owner, kind, None, len(walk.layers), leaf=True))
        weights[full] = (p, grad, layer, own)
    return weights


def _run_widened(done: Compared, walk: Walk, mode: Widened, module: nn.Module, weights: _Weights) -> None:
    """Replay the call once in the wide format, and compare."""
    call, wide = done.call, mode.wide
    args, kwargs = copied_arguments(call)
    wider_copies: dict[int, Tensor] = {}

    def widen(x: Tensor) -> Tensor:
        if not tensor_leaves.is_strided(x) or not (x.is_floating_point() or x.is_complex()):
            return x
        if id(x) not in wider_copies:
            wider_copies[id(x)] = x.detach().to(wider(x.dtype, wide)).requires_grad_(x.requires_grad)
        return wider_copies[id(x)]

    args, kwargs = (tensor_leaves.mapped(given, widen, objects=True) for given in (args, kwargs))
    with walk.hooked(), mode:
        result = module(*args, **kwargs)
    if isinstance(walk, PieceByPiece):
        walk.end_at(list(tensor_leaves.floating(result)), call.gradients)
        with mode:
            walk.compare_gradients(weights)
        return
    pairs = [(x, g.to(x.dtype)) for x, g in with_gradients(result, call.gradients)]
    inputs = [*(p for p, *_ in weights.values()), *(x for _, x in leaves_of((args, kwargs)))]
    if done.backward != "compared" or not pairs or not inputs:
        return
    with mode:
        gradients = _gradients(pairs, inputs)
    for (_, reduced, layer, name), grad in zip(weights.values(), gradients, strict=False):
        if grad is not None:
            layer.point("weight_grad").add_accumulated(relative_l2(reduced, grad), None, name, reduced)


def _gradients(pairs: Sequence[tuple[Tensor, Tensor]], inputs: Sequence[Tensor]) -> Gradients:
    """Return the gradients of the inputs, from pairs of output and its gradient; None for inputs that were not used."""
    return take_gradients([x for x, _ in pairs], inputs, [g for _, g in pairs], allow_unused=True)


def _count_equal(done: Compared, call: RootCall, result: Any) -> None:
    """Count the root outputs known from the run, and those that the replay reproduces."""
    for name, x in tensor_leaves.floating(result):
        kept = call.output(name)
        if kept is not None and kept.shape == x.shape and kept.dtype == x.dtype:
            done.outputs += 1
            done.equal += same_bits(kept, x.detach())
