"""``torch.func``'s transforms in evaluated text: ``vmap(grad(f))`` of a function of the user's that is followed.

A transform is a closure of torch's around the function. Here it is made once more around what follows that function's
text; torch transforms the operations this comes to, as it did those of the function itself.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from precdoctor.recording.microscope.pure import UnknownValueError, guarded
from precdoctor.recording.microscope.teachers import called_again
from precdoctor.recording.microscope.tracer import Tracer
from precdoctor.recording.process import attach

_FOLDER = str(Path("torch", "_functorch"))
#: They make a function of a function, and call nothing.
_MAKERS = tuple(getattr(torch.func, n) for n in ("vmap", "grad", "grad_and_value", "jacrev", "jacfwd"))
#: Transforms of transforms.
_MAX_DEPTH = 4


def makes_transform(function: Any, args: list[Any]) -> bool:
    """Whether it is ``torch.func.vmap`` or the like, given a function."""
    makes = any(function is maker for maker in (*_MAKERS, torch.vmap))
    return makes and bool(args) and type(args[0]) is types.FunctionType


def around(function: Any, follow: Callable[[Any, list[Any], dict[str, Any]], Any], depth: int = 0) -> Any:
    """The same transform, of the followed function; null for a function that is none."""
    if type(function) is not types.FunctionType or _FOLDER not in function.__code__.co_filename or depth == _MAX_DEPTH:
        return None
    inner = getattr(function, "__wrapped__", None)
    if type(inner) is not types.FunctionType or not any(_holds(c, inner) for c in function.__closure__ or ()):
        return None
    within = around(inner, follow, depth + 1)
    if within is None:
        if _FOLDER in inner.__code__.co_filename:
            return None

        def within(*args: Any, **kwargs: Any) -> Any:
            return follow(inner, list(args), kwargs)

    cells = tuple(types.CellType(within) if _holds(c, inner) else c for c in function.__closure__ or ())
    again = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    again.__kwdefaults__ = function.__kwdefaults__
    return again


def _holds(cell: types.CellType, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError as error:  # empty
        attach.let_through(error)
        return False


def run(tracer: Tracer, transformed: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Its result; the tracer learns which operations were those of the function, not of what became of it."""
    first = len(tracer.records)
    try:
        return guarded(transformed, *args, **kwargs)
    finally:
        tracer.transformed.update(range(first, len(tracer.records)))


def functional(tracer: Tracer, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """``torch.func.functional_call``: no replay of the module exists, so it may be in training."""
    module, rest = (args[0] if args else None), args[1:]
    if not isinstance(module, nn.Module):
        raise UnknownValueError("functional_call")
    return called_again(tracer, module, rest, kwargs, bound=True)


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Inside, no transform is in force: what is made there outlives them."""
    if torch._C._functorch.maybe_current_level() is None:
        yield
        return
    from torch._functorch import pyfunctorch

    with pyfunctorch.temporarily_clear_interpreter_stack():
        yield
