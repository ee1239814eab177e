"""Replays one root call of the step, forward and backward, under the tracer and isolated from the run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from precdoctor.recording.kernels.outside_user_modes import with_functions
from precdoctor.recording.microscope.slicing import Slice, slice_back
from precdoctor.recording.microscope.tracer import External, Source, Tracer
from precdoctor.recording.model import static, tensor_leaves
from precdoctor.recording.model.module_names import Names, unwrap
from precdoctor.recording.ops.dispatched_ops import OpByOp, storage_key, take_gradients
from precdoctor.recording.ops.op_facts import Wanted
from precdoctor.recording.ops.tensor_facts import NEG_INF, badness
from precdoctor.recording.process import attach
from precdoctor.recording.scene.compiled_function import CompiledFunction
from precdoctor.recording.scene.loss_graph import GradCall
from precdoctor.recording.scene.root_call import RootCall
from precdoctor.recording.scene.state_restore import (
    Attributes,
    Autocast,
    attributes_aside,
    buffers_aside,
    without_hooks,
)


@dataclass
class Replay:
    """The outcome of a replay of a root call or of other code, or of a live trace."""

    #: The root call, or the one whose argument the replayed code made; None for loss code, optimizers, live traces.
    call: RootCall | None
    tracer: Tracer
    #: Bad output leaves: name, kinds of bad values, and the ops that wrote them.
    bad_outputs: list[tuple[str, int, Source]] = field(default_factory=list)
    #: Bad gradients of parameters and arguments, in the same form.
    bad_gradients: list[tuple[str, int, Source]] = field(default_factory=list)
    #: All gradients of arguments, by name.
    argument_gradients: dict[str, Tensor] = field(default_factory=dict)
    #: For loss code: outputs of top-level modules with which it began, and their gradients.
    output_gradients: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    #: Bad buffers that it wrote to, in the form of ``bad_outputs``.
    bad_buffers: list[tuple[str, int, Source]] = field(default_factory=list)
    micro_step: int = 0
    #: Number of outputs that could be compared with those of the run, and of these that are equal (:func:`same_bits`).
    compared: int = 0
    equal: int = 0
    #: Names of outputs that are bad in the run and finite in the replay.
    missing: list[str] = field(default_factory=list)
    #: Replays it once more, for full facts of ops of this replay; None for optimizers and live traces.
    again: Callable[[Wanted], Replay] | None = None

    @property
    def bad(self) -> list[tuple[str, int, Source]]:
        """The bad buffers if any, else outputs, else gradients."""
        return self.bad_buffers or self.bad_outputs or self.bad_gradients

    def slice(self) -> Slice:
        """Trace the bad values back to the ops that made them; empty if no op did."""
        return slice_back(self.tracer.records, [source for _, _, source in self.bad])


class Alone(OpByOp):
    """Refuses ops that communicate: the other ranks take no part in this replay, and it would wait for them.

    Every op of the replay passes through this mode, which lies below the tracer.
    """

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op.

        Raises:
            RuntimeError: it is a collective.
        """
        if func.namespace in ("c10d", "_c10d_functional"):
            raise RuntimeError("the module communicates with other ranks, which take no part in a replay now")
        return func(*args, **kwargs)


def replay(
    call: RootCall,
    names: Names,
    *,
    backward: bool = False,
    grad_call: GradCall | None = None,
    buffers: bool = False,
    wanted: Wanted | None = None,
    values: bool,
) -> Replay:
    """Replay ``call``. Everything but random number generators and module attributes is left as it was.

    Args:
        backward: whether to replay the backward pass, from the gradients that the run computed for the outputs.
        grad_call: a call of ``torch.autograd.grad`` whose backward pass is to be replayed instead.
        buffers: whether to look for buffers that the forward pass makes non-finite.
        wanted: ops whose full facts are wanted, by their index in an earlier replay of the same call.
        values: whether facts may hold single values.

    Raises:
        Exception: whatever the user's forward raises.
    """
    module = unwrap(call.module)
    modules = static.modules(module)
    call.random.restore()
    with with_first_attributes(call, modules), without_hooks(modules), buffers_aside(modules, call.buffers), eager():
        tracer = Tracer(_known_storages(module, names), wanted, values=values)
        done = Replay(call, tracer, micro_step=call.micro_step)
        done.again = lambda wanted: replay(
            call, names, backward=backward, grad_call=grad_call, buffers=buffers, wanted=wanted, values=values
        )
        before = {id(b) for b in static.buffers(module) if badness(b)} if buffers else set()
        _run(done, call, module, names, backward=backward, grad_call=grad_call)
        for name, buffer in static.named_buffers(module) if buffers else ():
            if id(buffer) not in before and (bad := badness(buffer.detach())):
                done.bad_buffers.append((name, bad, tracer.source(buffer)))
    return done


def _run(
    done: Replay, call: RootCall, module: nn.Module, names: Names, *, backward: bool, grad_call: GradCall | None
) -> None:
    """Run the module and, if asked for, its backward pass under the tracer."""
    tracer = done.tracer
    with _module_names(tracer, names, module), Autocast.again(call.autocast), torch.enable_grad():
        arguments = copied_arguments(call)
        _note_arguments(tracer, call, arguments)
        own = dict(static.named_parameters(module))
        given = call.bound or {name: _weight_before(call, name, own[name]) for name in call.writes if name in own}
        bound = {name: x.detach().clone().requires_grad_(x.requires_grad) for name, x in given.items()}
        for name, x in bound.items():
            tracer.note(x, External("computed" if name in call.computed else "weight", name))
        step = module if type(module) is CompiledFunction and module.trains else None
        try:
            with tracer, gradients_aside(list(static.parameters(module)) if step is not None else []):
                result = (
                    torch.func.functional_call(module, bound, *arguments)
                    if bound
                    else module(*arguments[0], **arguments[1])
                )
        except Exception as error:
            if call.returned:
                raise
            attach.let_through(error)
            _note_last_result(done)
            return
        _judge_outputs(done, call, result)
        if backward or grad_call is not None:
            weights = {**own, **bound}
            brought = call.gradients if step is None else {"": step.brought(result)}
            if grad_call is not None:
                brought = call.grad_call_gradients.get(grad_call.number, {})
                memory = set(map(storage_key, grad_call.inputs()))
                weights = {n: p for n, p in weights.items() if storage_key(call.bound.get(n, own.get(n, p))) in memory}
            _backward(done, brought, weights, result, arguments, alone=module is call.module)


def _weight_before(call: RootCall, name: str, weight: Tensor) -> Tensor:
    """Return a parameter, which the forward pass writes to, as it was before the call.

    Its current values if no copy was kept; at the module's first call with non-finite ones set to 0.
    """
    if name in call.before:
        return call.before[name].requires_grad_(weight.requires_grad)
    return (
        torch.nan_to_num(weight.detach(), 0.0, 0.0, 0.0).requires_grad_(weight.requires_grad) if call.first else weight
    )


@contextlib.contextmanager
def with_first_attributes(call: RootCall, modules: list[nn.Module]) -> Iterator[None]:
    """Give modules the attributes (such as ``ready``) that a first call found, if it wrote to parameters."""
    if call.first is None:
        yield
        return
    now = Attributes(modules)
    call.first.attributes.restore()
    try:
        with attributes_aside(modules):
            yield
    finally:
        now.restore()


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Run compiled modules uncompiled and turn the user's function modes on, inside the context.

    A process that compiles nothing need not load the compiler.
    """
    compiles = "torch._dynamo.eval_frame" in sys.modules
    with torch.compiler.set_stance("force_eager") if compiles else contextlib.nullcontext(), with_functions():
        yield


def copied_arguments(call: RootCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return copies of the arguments, which a forward may write to; those that need gradients are leaves."""
    copies: dict[int, Tensor] = {}

    def copy(x: Tensor) -> Tensor:
        if id(x) not in copies:
            copies[id(x)] = x.detach().clone().requires_grad_(x.requires_grad) if tensor_leaves.is_strided(x) else x
        return copies[id(x)]

    return tensor_leaves.mapped(call.args, copy, objects=True), tensor_leaves.mapped(call.kwargs, copy, objects=True)


def leaves_of(arguments: Any) -> list[tuple[str, Tensor]]:
    """Return name and tensor of the leaves among copied arguments that need a gradient."""
    return [(n, x) for n, x in tensor_leaves.tensors(arguments, objects=True) if x.requires_grad and x.is_leaf]


def with_gradients(result: Any, brought: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return the outputs of a replay with copies of the gradients that the run computed for them, by name."""
    return [
        (x, brought[name].clone())
        for name, x in tensor_leaves.floating(result)
        if name in brought and x.requires_grad and brought[name].shape == x.shape
    ]


def _note_arguments(tracer: Tracer, call: RootCall, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    """Note which copies are arguments computed by other code, and which are the batch."""
    given: dict[Any, Any] = {**dict(enumerate(arguments[0])), **arguments[1]}
    for (name, _, _), (_, x) in zip(call.versions, tensor_leaves.tensors(given, objects=True), strict=False):
        tracer.note(x, External("argument" if x.requires_grad else "batch", name))


def _judge_outputs(done: Replay, call: RootCall, result: Any) -> None:
    """Note bad outputs, and compare outputs with those of the run."""
    for name, x in tensor_leaves.floating(result):
        bad = badness(x.detach())
        if bad:
            done.bad_outputs.append((name, bad, done.tracer.source(x)))
        original = call.output(name)
        if original is not None and original.shape == x.shape and original.dtype == x.dtype:
            done.compared += 1
            done.equal += same_bits(original, x.detach())
            if not bad and badness(original):
                done.missing.append(name)


def _note_last_result(done: Replay) -> None:
    """Note the last bad result of a call that raises, as in the run, in place of its outputs; a mask is none."""
    for record in reversed(done.tracer.records):
        if record.bad_out & ~NEG_INF:
            done.bad_outputs.append(("", record.bad_out, (record.index,)))
            return


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal, with NaN in the same places; 0.0 equals -0.0."""
    return a.shape == b.shape and bool(((a == b) | (torch.isnan(a) & torch.isnan(b))).all())


def _backward(
    done: Replay,
    brought: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    result: Any,
    arguments: tuple[Any, Any],
    *,
    alone: bool,
) -> None:
    """Replay the backward pass of a root call, and note bad gradients."""
    pairs = [(x, done.tracer.forget(grad)) for x, grad in with_gradients(result, brought)]
    if not pairs:
        return
    inputs: dict[str, Tensor] = {f"weight {n}": p for n, p in weights.items() if p.requires_grad}
    inputs |= {f"argument {n}": x for n, x in leaves_of(arguments)}
    leaves_in = list(inputs.values())
    if not leaves_in:
        return
    with gradients_aside(leaves_in):
        gradients = _gradients(done.tracer, pairs, leaves_in, alone=alone)
        for name, grad in zip(inputs, gradients, strict=True):
            bad = badness(grad) if grad is not None else 0
            if grad is not None and name.startswith("argument "):
                done.argument_gradients[name.removeprefix("argument ")] = grad
            if grad is not None and bad:
                done.bad_gradients.append((name, bad, done.tracer.source(grad)))


def _gradients(
    tracer: Tracer, pairs: list[tuple[Tensor, Tensor]], inputs: list[Tensor], *, alone: bool
) -> list[Tensor | None]:
    """Return gradients without accumulating them into ``.grad``.

    Reentrant checkpointing refuses that; then ``backward`` is run with ``.grad`` set aside, unless a wrapper (``alone``
    is false) has hooks that would act on it.
    """
    outputs, brought = [o for o, _ in pairs], [g for _, g in pairs]
    try:
        with tracer:
            return list(take_gradients(outputs, inputs, brought, allow_unused=True, retain_graph=True))
    except RuntimeError as error:
        if "heckpoint" not in str(error) or not alone:
            raise
    run: Any = getattr(torch.autograd.backward, "__wrapped__", torch.autograd.backward)
    with tracer:
        run(outputs, brought)
    return [x.grad for x in inputs]


@contextlib.contextmanager
def gradients_aside(inputs: list[Tensor]) -> Iterator[None]:
    """Take gradients and hooks off leaf tensors inside the context."""
    held = [(x, x.grad) for x in inputs]
    hooks = [(d, dict(d)) for x in inputs for d in (x._backward_hooks, x._post_accumulate_grad_hooks) if d]
    try:
        for x in inputs:
            x.grad = None
        for dictionary, _ in hooks:
            dictionary.clear()
        yield
    finally:
        for x, grad in held:
            x.grad = grad
        for dictionary, items in hooks:
            dictionary.update(items)


def _known_storages(module: nn.Module, names: Names) -> dict[int, External]:
    """Return the weights and buffers by storage."""
    known: dict[int, External] = {}

    def note(x: Tensor, external: External) -> None:
        if (key := storage_key(x)) is not None:
            known.setdefault(key, external)

    for name, p in static.named_parameters(module):
        note(p, External("weight", names.full_name(p) or name))
    for name, b in static.named_buffers(module):
        note(b, External("buffer", name))
    return known


@contextlib.contextmanager
def _module_names(tracer: Tracer, names: Names, module: nn.Module) -> Iterator[None]:
    """Keep the tracer's list of running modules up to date inside the context."""
    place = nn.modules.module
    fqn = {
        id(m): (found.module if (found := names.find(m)) is not None else n) for n, m in static.named_modules(module)
    }
    stack: list[nn.Module] = []

    def enter(m: nn.Module, _args: Any) -> None:
        stack.append(m)
        above = tracer.modules[-1] if tracer.modules else ""
        tracer.modules.append(fqn.get(id(m), f"{above}.{type(m).__name__}".lstrip(".")))

    def leave(m: nn.Module, _args: Any, _result: Any) -> None:
        while stack and stack.pop() is not m:
            tracer.modules.pop()
        if tracer.modules:
            tracer.modules.pop()

    handles = [
        place.register_module_forward_pre_hook(enter),
        place.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
