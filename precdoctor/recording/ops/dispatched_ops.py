"""Facts of an op that torch dispatches, and putting dispatch modes of ours on torch's stack.

The stack does not keep its modes alive. One that is on another thread's, or on the one that autograd will put back as a
backward pass ends, must be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from precdoctor.recording.model import tensor_leaves

#: The number the next autograd node will get; the node of a running forward op has the one before.
sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined] # not in __all__

#: torch's own, as it is before the recorder listens to the user's calls of it.
take_gradients: Callable[..., Any] = getattr(torch.autograd.grad, "__wrapped__", torch.autograd.grad)

#: They leave memory as it was before somebody else used it.
UNINITIALISED = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"))
#: Random ops whose result depends on nothing but generator and arguments; others that draw (attention with dropout)
#: are run as they are.
DRAWS = frozenset(
    ("bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial", "native_dropout",
     "normal", "normal_", "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "random",
     "random_", "randperm", "uniform", "uniform_")
)  # fmt: skip
#: What they write to is not read by them.
OVERWRITING = frozenset(("copy_", "fill_", "zero_", "uniform_", "normal_", "bernoulli_", "exponential_", "random_"))


def storage_key(x: Tensor) -> int | None:
    """Equal for tensors that share memory, as long as both are alive; None without memory of its own."""
    if x.layout is not torch.strided or tensor_leaves.is_wrapped(x):
        return None
    return int(x.untyped_storage()._cdata)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors in the arguments or results of an op, which nests lists only."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The floating-point arguments an op changes in place."""
    found: list[Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += [x for x in tensors_in(value) if x.is_floating_point() or x.is_complex()]
    return found or (_statistics(func, args) if op_name(func).endswith("batch_norm") else found)


def _statistics(func: Any, args: Any) -> list[Tensor]:
    """Running statistics, which older batch norm ops write to without saying so."""
    named = {a.name: x for a, x in zip(func._schema.arguments, args, strict=False)}
    if not named.get("training", named.get("train")):
        return []
    return [x for n in ("running_mean", "running_var") if isinstance(x := named.get(n), Tensor)]


def is_out_variant(func: Any) -> bool:
    """Whether the op writes to an ``out=`` argument."""
    return any(a.is_out for a in func._schema.arguments)


def op_name(func: Any) -> str:
    """``add_`` of ``aten.add_.Tensor``."""
    return str(func.overloadpacket.__name__)


class Retiring(TorchDispatchMode):
    """A mode that may be over while it is still open; then it must do nothing but run the op.

    Attributes:
        over: it is.
        watches: it sees the user's own run of every op, and changes nothing: no replay, no trace.
        ignores_ours: it does nothing about ops of the recorder.
        opened_in_inference: it was first opened in inference mode.
    """

    over = False
    watches = False
    ignores_ours = False
    opened_in_inference: bool | None = None


#: Tensors that a mode of torch's runs the ops of; it lies beneath all other modes.
_RUN_BY_A_MODE = frozenset(("FakeTensor", "FunctionalTensor"))


def left_to_others(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """The result of an op for a mode that does not look into tensors that compute by themselves.

    Returns:
        ``NotImplemented`` for DTensors and their like: they run the op, and the mode sees the ops inside of it. Fake
        tensors, with which a DTensor finds out how a result is sharded, have a mode of torch's, which is asked next.
    """
    if any(kind.__name__ in _RUN_BY_A_MODE for kind in types):
        return func(*args, **kwargs)
    return NotImplemented


#: What is on some thread's stack, by ``id``.
open_modes: dict[int, TorchDispatchMode] = {}


def in_backward() -> bool:
    """Whether this thread runs part of a backward pass.

    When that ends, autograd puts the stack back as it was when it began: what had been open before has to stay open
    until then.
    """
    return bool(torch._C._current_graph_task_id() != -1)


def will_come_back(mode: Retiring | None = None) -> bool:
    """Whether torch will put back what this thread has open now: behind a backward pass, or behind inference mode.

    A mode that is taken off before that would leave the stack empty, and torch set to look there.

    Args:
        mode: to be taken off; null for one to be opened.
    """
    return in_backward() or (torch.is_inference_mode_enabled() and not (mode is not None and mode.opened_in_inference))


def put_on(mode: TorchDispatchMode) -> None:
    """Open a mode in this thread."""
    open_modes[id(mode)] = mode
    if isinstance(mode, Retiring) and mode.opened_in_inference is None:
        mode.opened_in_inference = torch.is_inference_mode_enabled()
    mode.__enter__()


def take_off(mode: TorchDispatchMode) -> None:
    """Close a mode, if it is open in this thread, also under modes that somebody has opened since and not closed."""
    depth = torch._C._len_torch_dispatch_stack()
    if not any(torch._C._get_dispatch_stack_at(i) is mode for i in range(depth)):
        return
    above: list[Any] = []
    while torch._C._get_dispatch_stack_at(torch._C._len_torch_dispatch_stack() - 1) is not mode:
        above.append(torch._C._pop_torch_dispatch_stack(None))
    mode.__exit__(None, None, None)
    for other in reversed(above):
        torch._C._push_on_torch_dispatch_stack(other)
    open_modes.pop(id(mode), None)


def is_own_run(*beside: type[TorchDispatchMode]) -> bool:
    """Whether this thread runs the user's code as it is: no mode on its stack replays, traces or counts.

    Args:
        beside: modes of these classes may be open.
    """
    stack = (torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack()))
    return all(isinstance(m, beside) or (isinstance(m, Retiring) and m.watches) for m in stack)


def retire(mode: Retiring) -> None:
    """Close a mode for good, from wherever: what cannot be taken off now is over, and :func:`sweep` takes it off."""
    mode.over = True
    if not will_come_back(mode):
        take_off(mode)


def retired() -> list[Retiring]:
    """Those on this thread's stack that are over."""
    depth = torch._C._len_torch_dispatch_stack() if open_modes else 0
    modes = [open_modes.get(id(torch._C._get_dispatch_stack_at(i))) for i in range(depth)]
    return [m for m in modes if isinstance(m, Retiring) and m.over]


def sweep() -> None:
    """Take off this thread's stack what is over, and only in the way."""
    if open_modes and not in_backward():
        for mode in retired():
            if not will_come_back(mode):
                take_off(mode)
