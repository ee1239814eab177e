"""Facts about dispatched ops, and the opening and closing of our dispatch modes on torch's stack.

The stack does not keep its modes alive. A mode must be kept while it is on another thread's stack, or on the one that
autograd restores at the end of a backward pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from precdoctor.recording.model import static, tensor_leaves

#: Returns the number that the next autograd node will get; the node of an op that has just run has the one before.
sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined] # not in __all__

#: ``torch.autograd.grad`` without our patch, which records the user's calls.
take_gradients: Callable[..., Any] = getattr(torch.autograd.grad, "__wrapped__", torch.autograd.grad)

#: Ops that return memory with arbitrary content.
UNINITIALISED = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"))
#: Random ops whose result depends only on generator and arguments, so that a recorded draw can replace it. Other ops
#: that draw (attention with dropout) are run as they are.
DRAWS = frozenset(
    ("bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial", "native_dropout",
     "normal", "normal_", "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "random",
     "random_", "randperm", "uniform", "uniform_")
)  # fmt: skip
#: Ops whose derivatives torch computes by other formulas while any mode is on the stack, with other rounding: ``prod``
#: always, the others in second derivatives.
_DERIVED_OTHERWISE = frozenset(("aten::prod", "aten::cumprod", "aten::_linalg_det"))
#: Ops that overwrite a tensor without reading it.
OVERWRITING = frozenset(("copy_", "fill_", "zero_", "uniform_", "normal_", "bernoulli_", "exponential_", "random_"))

#: Attribute of graphs that flatten their arguments, as those of ``torch.export`` do.
_EXPORTED = "_in_spec"


def storage_key(x: Tensor) -> int | None:
    """Return a key that is equal for tensors that share memory while both live; None without memory of its own."""
    if x.layout is not torch.strided or tensor_leaves.is_wrapped(x):
        return None
    return int(x.untyped_storage()._cdata)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in the arguments or results of an op."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def named_arguments(func: Any, args: Any, kwargs: Any) -> list[tuple[str, Any]]:
    """Return the arguments given to an op, each with its name."""
    schema = func._schema.arguments
    return [(schema[i].name if i < len(schema) else str(i), a) for i, a in enumerate(args)] + list(kwargs.items())


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the floating-point and complex arguments that an op writes to."""
    found: list[Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += [x for x in tensors_in(value) if x.is_floating_point() or x.is_complex()]
    return found or (_statistics(func, args) if op_name(func).endswith("batch_norm") else found)


def _statistics(func: Any, args: Any) -> list[Tensor]:
    """Return the running statistics that older batch norm ops write to in training, which their schema hides."""
    named = dict(named_arguments(func, args, {}))
    if not named.get("training", named.get("train")):
        return []
    return [x for n in ("running_mean", "running_var") if isinstance(x := named.get(n), Tensor)]


def is_out_variant(func: Any) -> bool:
    """Return whether the op writes to an ``out=`` argument."""
    return any(a.is_out for a in func._schema.arguments)


def op_name(func: Any) -> str:
    """Return the name without namespace and overload: ``add_`` for ``aten.add_.Tensor``."""
    return str(func.overloadpacket.__name__)


def is_derived_otherwise(func: Any) -> bool:
    """Return whether the gradient of an op would be rounded in another way with a mode on the stack."""
    return getattr(getattr(func, "_schema", None), "name", None) in _DERIVED_OTHERWISE


class OpByOp(TorchDispatchMode):
    """A mode that hands each op to :meth:`run`, unless the operands' own class runs it.

    Attributes:
        changes_gradients: whether an op has run whose gradient would be rounded in another way with a mode on the
            stack.
    """

    changes_gradients = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # as torch has it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(map(tensor_leaves.computes_itself, types)):
            return left_to_others(func, types, args, kwargs)
        if is_derived_otherwise(func):
            self.changes_gradients = True
        return self.run(func, args, kwargs)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run one op and return its result."""
        raise NotImplementedError


class Retiring(OpByOp):
    """A mode that may be over while it is still on a stack; then it must only run the op.

    Attributes:
        over: whether it is over.
        watches: whether it sees the user's own run of each op and changes nothing; false for replays and traces.
        ignores_ours: whether it does nothing about ops of the recorder.
        opened_in_inference: whether it was first opened in inference mode; None: not opened yet.
    """

    over = False
    watches = False
    ignores_ours = False
    opened_in_inference: bool | None = None


#: Tensor types whose ops are run by a mode of torch, which lies beneath all other modes.
_RUN_BY_A_MODE = frozenset(("FakeTensor", "FunctionalTensor"))


def left_to_others(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Return a mode's result for an op that it leaves to the operands' own class.

    Returns:
        ``NotImplemented`` for DTensors and the like: they run the op, and the mode sees the ops inside it. For fake
        tensors, with which a DTensor determines how a result is sharded, the op's result by torch's own mode.
    """
    if any(kind.__name__ in _RUN_BY_A_MODE for kind in types):
        return func(*args, **kwargs)
    return NotImplemented


#: The modes on any thread's stack, by ``id``.
open_modes: dict[int, TorchDispatchMode] = {}


def something_is_compiled() -> bool:
    """Return whether ``torch.compile`` was used in this process; optimizers load its package without using it."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    backends: Any = getattr(frames, "cached_backends", None)
    if not backends:
        return False
    return any(map(callable, backends.values()))  # None: functions that are never compiled


def is_compiled_graph(module: nn.Module) -> bool:
    """Return whether a module is a graph that ``torch.compile`` or ``torch.export`` may have made.

    One made by ``torch.fx`` (feature extractors, e3nn) is a module like any other: its forward is plain Python code.
    """
    if not issubclass(type(module), torch.fx.GraphModule):
        return False
    return _EXPORTED in static.module_dict(module) or something_is_compiled()


def in_backward() -> bool:
    """Return whether this thread runs part of a backward pass.

    At its end autograd restores the stack of modes from its beginning: modes open then must stay open until the end.
    """
    return bool(torch._C._current_graph_task_id() != -1)


def differentiates_forward() -> bool:
    """Return whether forward-mode differentiation is on: torch computes tangents otherwise with a mode on the stack."""
    return forward_ad._current_level >= 0


def will_come_back(mode: Retiring | None = None) -> bool:
    """Return whether torch will restore the open modes, at the end of a backward pass or of inference mode.

    A mode taken off before that would leave the stack empty while torch is set to look there.

    Args:
        mode: to be taken off; None: a mode is to be opened.
    """
    return in_backward() or (torch.is_inference_mode_enabled() and not (mode is not None and mode.opened_in_inference))


def _is_on(mode: TorchDispatchMode) -> bool:
    return any(torch._C._get_dispatch_stack_at(i) is mode for i in range(torch._C._len_torch_dispatch_stack()))


def put_on(mode: TorchDispatchMode) -> None:
    """Put a mode on this thread's stack, unless it is there: the second of two would outlive the mode."""
    if _is_on(mode):
        return
    open_modes[id(mode)] = mode
    if isinstance(mode, Retiring) and mode.opened_in_inference is None:
        mode.opened_in_inference = torch.is_inference_mode_enabled()
    mode.__enter__()


def take_off(mode: TorchDispatchMode) -> None:
    """Take a mode off this thread's stack, if it is there, even from beneath modes opened later."""
    if not _is_on(mode):
        return
    above: list[Any] = []
    while torch._C._get_dispatch_stack_at(torch._C._len_torch_dispatch_stack() - 1) is not mode:
        above.append(torch._C._pop_torch_dispatch_stack(None))
    mode.__exit__(None, None, None)
    for other in reversed(above):
        torch._C._push_on_torch_dispatch_stack(other)
    open_modes.pop(id(mode), None)


def _ours_on_top() -> Iterator[Retiring]:
    """Iterate over our own modes on top of this thread's stack that can be taken off, the topmost first.

    Below a mode of the user's ours may stay: with that one on the stack, torch uses the same formulas.
    """
    for i in reversed(range(torch._C._len_torch_dispatch_stack())):
        mode = torch._C._get_dispatch_stack_at(i)
        if not isinstance(mode, Retiring) or not mode.watches or will_come_back(mode):
            return
        yield mode


def step_aside() -> list[Retiring]:
    """Take our modes off this thread's stack if gradients would be rounded in another way with them there.

    Returns:
        The modes, for :func:`step_back`.
    """
    if torch._C._functorch.maybe_current_level() is not None:
        return []
    ours = list(_ours_on_top())
    if not any(mode.changes_gradients for mode in ours):
        return []
    for mode in ours:
        take_off(mode)
    return ours


def step_back(modes: list[Retiring]) -> None:
    """Put the modes back that :func:`step_aside` has taken off, without those that are over by now."""
    for mode in reversed(modes):
        if not mode.over:
            put_on(mode)


def is_own_run(*beside: type[TorchDispatchMode]) -> bool:
    """Return whether this thread runs the user's code as it is: no mode on its stack replays, traces or counts.

    Args:
        beside: classes of modes that may be open.
    """
    stack = (torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack()))
    return all(isinstance(m, beside) or (isinstance(m, Retiring) and m.watches) for m in stack)


def retire(mode: Retiring) -> None:
    """Close a mode for good, from anywhere; if it cannot be taken off now, :func:`sweep` does so later."""
    mode.over = True
    if not will_come_back(mode):
        take_off(mode)


def retired() -> list[Retiring]:
    """Return the modes on this thread's stack that are over."""
    depth = torch._C._len_torch_dispatch_stack() if open_modes else 0
    modes = [open_modes.get(id(torch._C._get_dispatch_stack_at(i))) for i in range(depth)]
    return [m for m in modes if isinstance(m, Retiring) and m.over]


def sweep() -> None:
    """Take modes that are over off this thread's stack."""
    if open_modes and not in_backward():
        for mode in retired():
            if not will_come_back(mode):
                take_off(mode)


def retire_all() -> None:
    """Close all of our modes on top of this thread's stack for good."""
    for mode in list(_ours_on_top()):
        retire(mode)
