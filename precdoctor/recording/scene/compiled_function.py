"""A compiled function in the form that a replay runs: uncompiled, with the modules it uses as its children."""

from __future__ import annotations

import contextlib
import dis
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from precdoctor.recording.model import static
from precdoctor.recording.ops.source_lines import is_foreign

#: Maximum depth of user functions that call each other whose code is inspected.
_MAX_DEPTH = 4
#: Names in code that must not run twice: it trains, needs the other ranks, or has effects outside the process.
_NOT_TWICE = frozenset(
    (
        *("backward", "step", "zero_grad", "all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter"),
        *("reduce_scatter_tensor", "all_to_all", "all_to_all_single", "broadcast", "barrier", "send", "recv", "reduce"),
        *("save", "write", "open", "input", "put", "exec", "eval"),
    )
)
#: The names among them that a replay of a train step never reaches, or that do nothing in it.
_TRAINING = frozenset(("backward", "step", "zero_grad"))
_GLOBAL_WRITES = frozenset(("STORE_GLOBAL", "DELETE_GLOBAL"))


class _BackwardReachedError(Exception):
    """The replay of a train step has reached its ``backward`` and ends here."""

    def __init__(self, loss: Tensor, gradient: Tensor | None) -> None:
        super().__init__()
        self.loss, self.gradient = loss, gradient


def _stop_at_backward(tensors: Any, grad_tensors: Any = None, *_args: Any, **_kwargs: Any) -> None:
    """Replace ``torch.autograd.backward`` in a replay: raise with the loss and the gradient it was given."""
    loss = tensors if isinstance(tensors, Tensor) else tensors[0]
    given = grad_tensors[0] if type(grad_tensors) in (tuple, list) else grad_tensors
    raise _BackwardReachedError(loss, given)


#: Patches for the replay of a train step: ``backward`` ends it, ``zero_grad`` does nothing.
_PATCHES: tuple[tuple[Any, str, Any], ...] = (
    (torch.autograd, "backward", _stop_at_backward),
    (torch.optim.Optimizer, "zero_grad", lambda *_args, **_kwargs: None),
    (nn.Module, "zero_grad", lambda *_args, **_kwargs: None),
)


class CompiledFunction(nn.Module):
    """A stand-in for a function where a replay expects a module; holds nothing of the user's between two steps.

    Args:
        trains: whether it is a whole train step, replayed up to its backward pass.
    """

    def __init__(self, *, trains: bool = False) -> None:
        super().__init__()
        self._function: Any = None
        self.trains = trains
        #: For a train step: the gradient that its last replay passed to ``backward`` beside the loss; None if it did
        #: not.
        self.gradient: Tensor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function; no module is entered, so ops of the function itself belong to no module."""
        return self._to_the_loss(*args, **kwargs) if self.trains else self._function(*args, **kwargs)

    def _to_the_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Run the train step up to ``backward`` and return the loss; gradients are neither read nor cleared."""
        with contextlib.ExitStack() as aside:
            for owner, name, instead in _PATCHES:
                aside.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, instead)
            try:
                self._function(*args, **kwargs)
            except _BackwardReachedError as reached:
                self.gradient = reached.gradient
                return reached.loss
        raise RuntimeError("the train step has no backward pass")

    def brought(self, loss: Tensor) -> Tensor:
        """Return the gradient that the backward pass of the loss began with; ones if the function gave none."""
        return torch.ones_like(loss).detach() if self.gradient is None else self.gradient.detach()

    def take(self, function: Any, values: Mapping[str, Any]) -> None:
        """Stand for a function until :meth:`release`; adopt modules and parameters in its instance and ``values``."""
        self._function = function
        owner = function.__self__ if type(function) is types.MethodType else None
        attributes = static.own(owner) if not issubclass(type(owner), nn.Module) else {}
        for name, value in {"self": owner, **attributes, **values}.items():
            kind = type(value)
            if issubclass(kind, nn.Module) and not any(value is m for m in self._modules.values()):
                self._modules[name if name not in self._modules else f"{name}{len(self._modules)}"] = value
            elif issubclass(kind, nn.Parameter):
                self._parameters[name] = value

    def owners(self, reads: Mapping[str, Any]) -> tuple[object, ...]:
        """Return objects other than modules that the function may write to: its instance, and outer variables."""
        owner = self._function.__self__ if type(self._function) is types.MethodType else None
        own = () if owner is None or issubclass(type(owner), nn.Module) or not static.own(owner) else (owner,)
        return (*own, types.SimpleNamespace(**reads))

    def release(self) -> None:
        self._function = self.gradient = None
        self._modules.clear()
        self._parameters.clear()


def trained_in(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the weights of compiled train steps among the modules: the optimizers of these announce no step."""
    steps = (m for m in modules if type(m) is CompiledFunction and m.trains)
    return [p for step in steps for p in step.parameters() if p.requires_grad]


def reads_of(function: Any) -> dict[str, Any]:
    """Return the variables, by name, that a function and the user functions it calls may read from outside."""
    found: dict[str, Any] = {}
    plain: Any = function.__func__ if type(function) is types.MethodType else function
    for each in _called_by(plain):
        names = {*_names_in(each.__code__)}
        found |= {n: each.__globals__[n] for n in names & each.__globals__.keys()}
        cells = zip(each.__code__.co_freevars, each.__closure__ or (), strict=True)
        found |= {n: c.cell_contents for n, c in cells if c != types.CellType()}
    return found


def trains(function: types.FunctionType) -> bool:
    """Return whether a function is a train step that may run again up to ``backward``, as far as names in it show."""
    found = False
    for each in _called_by(function):
        for code in _codes(each.__code__):
            names = code.co_names  # in order of first use
            if "step" in names and "backward" not in names[: names.index("step")]:
                return False
            found = found or "backward" in names
    return found and runs_again(function, besides=_TRAINING)


def runs_again(function: types.FunctionType, *, besides: frozenset[str] = frozenset()) -> bool:
    """Return whether running a function once more has no side effects, as far as names in its code show.

    Args:
        besides: forbidden names that it may use.
    """
    for each in _called_by(function):
        for code in _codes(each.__code__):
            if not (_NOT_TWICE - besides).isdisjoint(code.co_names) or any(
                i.opname in _GLOBAL_WRITES for i in dis.get_instructions(code)
            ):
                return False
    return True


def _called_by(function: types.FunctionType) -> Iterator[types.FunctionType]:
    """Yield the function and the user's own functions that its code names, in its module or closure, recursively."""
    waiting, met = [(function, 0)], {function}
    while waiting:
        each, depth = waiting.pop()
        yield each
        cells = [c.cell_contents for c in each.__closure__ or () if c != types.CellType()]
        named = [each.__globals__[n] for n in _names_in(each.__code__) if n in each.__globals__]
        for value in (*named, *cells) if depth < _MAX_DEPTH else ():
            if type(value) is types.FunctionType and value not in met and not is_foreign(value.__code__.co_filename):
                met.add(value)
                waiting.append((value, depth + 1))


def _names_in(code: types.CodeType) -> set[str]:
    return {name for each in _codes(code) for name in each.co_names}


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
