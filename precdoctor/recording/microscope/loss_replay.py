"""Replays the loss code from the autograd graph that it left, because it is no function that could be called again.

Each node shows the op that made it; its operands are the values of the nodes behind it, or what it saved. If a setting
was not saved, the node's value is taken from a later node that saved it, and used as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from precdoctor.numerics.nonfinite import can_make
from precdoctor.recording.kernels.outside_user_modes import with_functions
from precdoctor.recording.microscope.constants import (
    added_to,
    base_of,
    constant_reader,
    has_no_gradient,
    keeps_numbers,
    operand_names,
    unfilled,
)
from precdoctor.recording.microscope.derivatives import for_gradients
from precdoctor.recording.microscope.replay import Replay
from precdoctor.recording.microscope.tracer import External, Source, Tracer
from precdoctor.recording.ops.dispatched_ops import storage_key, take_gradients
from precdoctor.recording.ops.op_facts import Wanted
from precdoctor.recording.ops.tensor_facts import NEG_INF, badness, describe
from precdoctor.recording.process import attach
from precdoctor.recording.scene.loss_graph import Leaf, LossGraph, LossNode
from precdoctor.recording.scene.root_call import RootCall
from precdoctor.recording.scene.state_restore import Autocast
from precdoctor.recording.scene.step_snapshot import Scene

_WRAPPED = 1 << 63
_UNSEEN = External("constant")
#: Stands for values that nobody saved.
_UNKNOWN = External("unknown")
#: Nodes that reshape their operand and do not save the shape.
_RESHAPES = frozenset(("View", "UnsafeView", "ReshapeAlias"))


def replay_loss(
    graph: LossGraph,
    *,
    backward: bool,
    wanted: Wanted | None = None,
    before: RootCall | None = None,
    values: bool = True,
) -> Replay:
    """Replay loss code.

    Args:
        backward: whether to replay the backward pass, from the gradient that the run gave to ``backward``.
        wanted: ops whose full facts are wanted, by their index in an earlier replay of the same graph.
        before: for code between two top-level modules: the root call whose argument it made.
        values: whether facts may hold single values.
    """
    nodes = sorted(_nodes(graph.top), key=lambda n: n.sequence)
    leaves = _leaves(nodes)
    known = {
        k: External("weight" if leaf.name == "weight" else "argument", leaf.name)
        for leaf, x in leaves
        if (k := storage_key(x)) is not None
    }
    tracer = Tracer(known, wanted, values=values, writes_to=frozenset())  # only a hand-written backward writes at all
    done = Replay(before, tracer, micro_step=graph.micro_step)
    done.again = lambda wanted: replay_loss(graph, backward=backward, wanted=wanted, before=before, values=values)
    made: dict[int, Any] = {id(leaf): x for leaf, x in leaves}
    saved = _saved_by_consumers(nodes)
    rough: set[int] = set()
    with with_functions(), Autocast.off(), torch.enable_grad(), tracer:
        for node in nodes:
            tracer.line = node.line
            made[id(node)], as_saved = _run(node, made, saved, through_constants=backward)
            if backward:
                operands = [_value(behind, output, made) for behind, output in node.edges]
                value, as_kept = made[id(node)], saved.get(id(node))
                made[id(node)], as_saved = for_gradients(node, value, as_kept, operands, rough, as_saved=as_saved)
            if as_saved:
                with _disable_current_modes():
                    index = _record_saved(node, made, tracer, rough) if id(node) in saved else None
                    tracer.credit(made[id(node)], index)
    tracer.line = None
    loss = made.get(id(graph.top))
    if not isinstance(loss, Tensor):
        _judge_parts(done, [made[id(node)] for node in nodes])
        return done
    done.compared, done.equal = 1, int(torch.equal(torch.nan_to_num(loss.detach()), torch.nan_to_num(graph.value)))
    if bad := badness(loss.detach()):
        done.bad_outputs.append(("loss", bad, tracer.source(loss)))
        found = done.slice()
        if not (found.origins or found.made_worse(tracer.records)):
            done.bad_outputs.clear()  # the code before a loss module made it, whose saved result was used here
            _judge_parts(done, [made[id(node)] for node in nodes])
    if backward and loss.requires_grad:
        _backward(done, loss, graph, [(leaf, x) for leaf, x in leaves if x.requires_grad])
    return done


def _judge_parts(done: Replay, values: list[Any]) -> None:
    """Note the first bad value on the way to the loss, which could not be computed or has no origin.

    A ``-inf``, which may be a mask, only if there is nothing worse.
    """
    found: list[tuple[str, int, Source]] = []
    for x in values:
        source = done.tracer.source(x) if isinstance(x, Tensor) else _UNKNOWN
        if not isinstance(source, External) and (bad := badness(x.detach())):
            found.append(("", bad, source))
    done.bad_outputs += [bad for bad in found if bad[1] != NEG_INF][:1] or found[:1]


def _backward(done: Replay, loss: Tensor, graph: LossGraph, leaves: list[tuple[Leaf, Tensor]]) -> None:
    """Replay the backward pass of the loss code; note the gradients of its leaves."""
    gradient = graph.gradient if graph.gradient is not None else torch.ones_like(loss)
    if not leaves:
        return
    inputs = [x for _, x in leaves]
    given = done.tracer.forget(gradient.clone())
    try:
        with done.tracer:
            gradients: list[Tensor | None] = list(  # None where unused
                take_gradients([loss], inputs, [given], allow_unused=True)
            )
    except Exception as error:  # noqa: BLE001 - a backward pass written by hand may refuse to run twice
        attach.let_through(error)
        return
    for (leaf, _), grad in zip(leaves, gradients, strict=True):
        if grad is not None and leaf.name != "weight" and leaf.value is not None:
            done.output_gradients.append((leaf.value, grad))
        if grad is not None and (bad := badness(grad)):
            done.bad_gradients.append((leaf.name, bad, done.tracer.source(grad)))


def restore_lost_gradients(scene: Scene, *, values: bool) -> None:
    """Compute gradients of top-level modules' outputs again that did not fit into the scene memory."""
    lost = [(call, name, x) for call in scene.calls for name, x, _ in call.outputs if name in call.lost]
    for graph in scene.losses if lost else ():
        for value, grad in replay_loss(graph, backward=True, values=values).output_gradients:
            for call, name, x in lost:
                if x is value:
                    call.gradients[name] = grad
                    call.lost.discard(name)


# --- values ----------------------------------------------------------------------------------------------------------


def _nodes(top: LossNode) -> list[LossNode]:
    found: dict[int, LossNode] = {}
    waiting = [top]
    while waiting:
        node = waiting.pop()
        if id(node) not in found:
            found[id(node)] = node
            waiting += [behind for behind, _ in node.edges if isinstance(behind, LossNode)]
    return list(found.values())


def _leaves(nodes: list[LossNode]) -> list[tuple[Leaf, Tensor]]:
    """Return the leaves of the nodes with their values, which need gradients here."""
    found: dict[int, Leaf] = {}
    for node in nodes:
        found |= {id(behind): behind for behind, _ in node.edges if isinstance(behind, Leaf)}
    return [(leaf, leaf.value.detach().requires_grad_()) for leaf in found.values() if leaf.value is not None]


def _saved_by_consumers(nodes: list[LossNode]) -> dict[int, Tensor]:
    """Return the values of nodes, by ``id``, as later nodes saved them or as the nodes saved their own results."""
    values: dict[int, Tensor] = {}
    for node in nodes:
        own = node.saved.get("result")
        if isinstance(own, Tensor):
            values[id(node)] = own
            behind = node.edges[0][0] if node.edges else None
            if base_of(node) == "Relu" and isinstance(behind, LossNode):  # has the same derivative there
                values.setdefault(id(behind), own)
        for (behind, output), name in zip(node.edges, ("self", "other"), strict=False):
            value = node.saved.get(name)
            if isinstance(behind, LossNode) and output == 0 and isinstance(value, Tensor):
                values.setdefault(id(behind), value)
    return {k: x.detach().requires_grad_(x.is_floating_point() or x.is_complex()) for k, x in values.items()}


def _record_saved(node: LossNode, made: dict[int, Any], tracer: Tracer, rough: set[int]) -> int:
    """Record an op whose value was taken as saved, with the facts that are known; return its index."""
    value = made[id(node)].detach()
    values = [None if id(behind) in rough else _value(behind, output, made) for behind, output in node.edges]
    name, names = _op_of(node)
    operands = list(zip(names, values, strict=True))
    known = [x.detach() for _, x in operands if x is not None]
    unknown = [n for n, x in operands if x is None and not isinstance(node.saved.get(n), Tensor)]
    facts: dict[str, Any] = {
        "operands": [{"argument": n, **describe(x.detach())} for n, x in operands if x is not None],
        "settings": {},
        "results": [describe(value)],
        "reference": None,
        **({"unknown": unknown} if unknown else {}),
    }
    op = node.name.removesuffix("Backward") if "own" in node.saved else f"aten.{name}.default"
    hidden = any(isinstance(behind, LossNode) and made.get(id(behind)) is None for behind, _ in node.edges)
    reads, kinds = _operand_values(node, made), badness(value)
    also = None
    if hidden and kinds == NEG_INF:  # an operand is unknown: if only -inf came out, take that for a mask
        also = (_UNSEEN, NEG_INF)
    elif not can_make(name, kinds) and not value.is_complex() and not any(badness(x) & kinds for x in reads):
        also = (_UNKNOWN if hidden else _UNSEEN, kinds)  # the op cannot make it (exp of a number is never NaN)
    elif kinds and not any(map(badness, reads)) and keeps_numbers(node, known, value):
        reader = constant_reader(node, made) if unknown else node
        also = (_UNSEEN, kinds) if reader is node else None if reader is not None else (_UNKNOWN, kinds)
        if reader is node and len(unknown) == 1:
            counted = {"min": None, "max": None, "amax": None, "amin_nonzero": None}
            constant = -value if base_of(node) == "Sub" and unknown == ["other"] else value  # bad in the same places
            facts["operands"].append({"argument": unknown[0], **describe(constant), **counted})
        elif reader is not None and reader is not node:
            reads.append(_record_reader(reader, made, tracer, value))
    return tracer.note_op(op, node.line, reads, value, facts, also=also)


def _record_reader(node: LossNode, made: dict[int, Any], tracer: Tracer, bad: Tensor) -> Tensor:
    """Record an op of unknown value that read a bad constant; return a tensor that stands for its result."""
    values = [_value(behind, output, made) for behind, output in node.edges]
    name, names = _op_of(node)
    operands = [(n, x.detach()) for n, x in zip(names, values, strict=True) if x is not None]
    known = [x for _, x in operands]
    facts = {"operands": [{"argument": n, **describe(x)} for n, x in operands], "settings": {}}
    stand_in = torch.full((), torch.nan, dtype=bad.dtype)
    tracer.note_op(f"aten.{name}.default", node.line, known, stand_in, facts, also=(_UNSEEN, badness(bad)))
    return stand_in


def _op_of(node: LossNode) -> tuple[str, list[str]]:
    """Return the name of the op that made a node, and a name for each of its edges."""
    packet = next(iter(_packets(node)), None)
    return packet.__name__ if packet is not None else base_of(node).lower(), operand_names(node, packet)


def _operand_values(node: LossNode, made: dict[int, Any]) -> list[Tensor]:
    """Return the values of a node's operands; for an unknown one (``x + eps``) the values behind it."""
    found: list[Tensor] = []
    waiting, met = [node], {id(node)}
    while waiting:
        for behind, output in waiting.pop().edges:
            if (value := _value(behind, output, made)) is not None:
                found.append(value.detach())
            elif isinstance(behind, LossNode) and id(behind) not in met:
                met.add(id(behind))
                waiting.append(behind)
    return found


def _run(
    node: LossNode, made: dict[int, Any], saved: dict[int, Tensor], *, through_constants: bool
) -> tuple[Any, bool]:
    """Return the node's value: computed again, else as saved (gradients then end there), else None.

    Args:
        through_constants: whether gradients have to pass a sum with a constant that is NaN.

    Returns:
        The value, and whether it is the saved one.
    """
    operands = [_value(behind, output, made) for behind, output in node.edges]
    if (same := unfilled(node, operands)) is not None:
        return same, False
    for function, args, kwargs in _candidates(node, operands):
        try:
            result = function(*args, **kwargs)
        except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError) as error:
            attach.let_through(error)
            continue
        first = result[0] if isinstance(result, (tuple, list)) else result
        if _fits(node, first):
            return result, False
    value = saved.get(id(node))
    if value is None:
        return None, False
    through = added_to(node, operands)
    if through is not None and not badness(through.detach()) and (through_constants or not badness(value.detach())):
        return value.detach() + (through - through.detach()), False
    return value, True


def _fits(node: LossNode, value: Any) -> bool:
    same = isinstance(value, Tensor) and tuple(value.shape) == node.shape
    return same and (node.dtype is None or value.dtype == node.dtype)


def _value(behind: LossNode | Leaf | None, output: int, made: dict[int, Any]) -> Tensor | None:
    """Return the value of an operand: of one output of the node behind it; None if unknown."""
    value = made.get(id(behind)) if behind is not None else None
    if isinstance(value, (tuple, list)):
        value = value[output] if output < len(value) else None
    return value if isinstance(value, Tensor) else None


# --- ops -------------------------------------------------------------------------------------------------------------


def _candidates(node: LossNode, operands: list[Tensor | None]) -> Iterator[tuple[Any, list[Any], dict[str, Any]]]:
    """Yield calls that may have made the node; the first that returns its shape and dtype is used."""
    name = base_of(node)
    first = operands[0] if operands else None
    if name in _RESHAPES and first is not None:
        yield first.reshape, [node.shape], {}
        return
    if name == "Expand" and first is not None:
        yield first.expand, [node.shape], {}
        return
    if name == "ToCopy" and first is not None and node.dtype is not None:
        yield first.to, [node.dtype], {}
        return
    for packet in _packets(node):
        for overload in packet.overloads():
            if (call := _arguments(getattr(packet, overload), node, list(operands))) is not None:
                yield getattr(packet, overload), *call


def _arguments(function: Any, node: LossNode, operands: list[Tensor | None]) -> tuple[list[Any], dict[str, Any]] | None:
    """Return the arguments of an overload, from the graph and from what was saved; None if one is missing."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    waiting = list(operands)
    tensors = sum("Tensor" in str(a.type) for a in function._schema.arguments)
    value: Any
    for argument in function._schema.arguments:
        if argument.is_out or (argument.alias_info is not None and argument.alias_info.is_write):
            return None
        kind, name = str(argument.type), argument.name
        if "Tensor[]" in kind or "List[Tensor]" in kind:
            if not waiting or any(x is None for x in waiting):
                return None
            value, waiting = waiting, []
        elif "Tensor" in kind and tensors > len(waiting) and has_no_gradient(node.saved.get(name)):
            value = node.saved[name]  # a condition or an index: no edge leads to it
        elif "Tensor" in kind and waiting and (waiting[0] is not None or name not in node.saved):
            value = waiting.pop(0)
            if value is None and "Optional" not in kind:
                return None
        elif name in node.saved:
            if "Tensor" in kind and waiting:
                waiting.pop(0)
            value = _setting(node.saved[name])
        elif argument.has_default_value():
            if argument.kwarg_only:
                continue
            value = argument.default_value
        elif kind == "bool" or "Optional" in kind:
            value = False if kind == "bool" else None
        else:
            return None
        tensors -= "Tensor" in kind
        if argument.kwarg_only:
            kwargs[name] = value
        else:
            args.append(value)
    return None if any(x is not None for x in waiting) else (args, kwargs)


def _setting(value: Any) -> Any:
    """Return a saved setting with negative integers restored: autograd shows negative dimensions as unsigned."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= _WRAPPED:
        return value - 2 * _WRAPPED
    if isinstance(value, (tuple, list)):
        return [_setting(v) for v in value]
    return value


def _packets(node: LossNode) -> Sequence[Any]:
    """Return the functional aten ops that may have made a node."""
    return _packets_by_name().get(base_of(node).lower(), ())


@functools.lru_cache(maxsize=1)
def _packets_by_name() -> dict[str, list[Any]]:
    """Return functional aten ops by name in lower case without underscores, as in the names of autograd nodes.

    One that users call (``ctc_loss``) comes before the one in it that autograd sees (``_ctc_loss``).
    """
    found: dict[str, list[Any]] = {}
    names = {n.split("::")[1].split(".")[0] for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")}
    for name in sorted(names, key=lambda n: (n.startswith("_"), n)):
        if not name.endswith("_") and (packet := getattr(torch.ops.aten, name, None)) is not None:
            found.setdefault(name.replace("_", ""), []).append(packet)
    return found
