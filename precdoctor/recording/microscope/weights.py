"""Weights and their gradients in evaluated text: code between the backward pass and the optimizer is about these.

A weight stands for itself until something is computed with it (a model is not copied for a loop over its parameters),
and what is put into its ``.grad`` is kept here, never there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from precdoctor.recording.microscope.pure import PLACEHOLDERS, UnknownValueError, guarded
from precdoctor.recording.microscope.tracer import External, Tracer
from precdoctor.recording.model import static
from precdoctor.recording.ops.dispatched_ops import storage_key
from precdoctor.recording.ops.tensor_facts import badness

#: What a loop over a model's weights calls, and what it must not have overridden.
_LISTS = frozenset(("parameters", "named_parameters"))
_WALKS = (*_LISTS, "named_modules", "_named_members", "__getattr__")
#: What can be asked of a weight without a copy of it.
_PLAIN = frozenset(("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "numel", "size", "dim"))


@dataclass(frozen=True)
class Weight:
    """A parameter of the user's, which nothing may write to."""

    parameter: nn.Parameter


PLACEHOLDERS.add(Weight)


class Gradients:
    """What ``.grad`` of each weight is in evaluated text.

    Args:
        before: gradients as the backward pass left them, by parameter, as far as they are known.
    """

    def __init__(self, before: Mapping[Tensor, Tensor]) -> None:
        self._before = before
        self._values: dict[int, Tensor | None] = {}
        self._weights: dict[int, nn.Parameter] = {}

    def of(self, tracer: Tracer, weight: Weight) -> Tensor | None:
        """The gradient at this point.

        Raises:
            UnknownValueError: somebody has written to it since.
        """
        p = weight.parameter
        if id(p) not in self._values:
            value = self._before.get(p, p.grad)
            if value is not None and (value.layout is not p.layout or badness(value)):
                raise UnknownValueError("a gradient as it was")
            with tracer.aside():
                self.put(weight, None if value is None else value.detach().clone())
            if (mine := self._values[id(p)]) is not None:
                tracer.note(mine, External("argument", "gradient"))
        return self._values[id(p)]

    def put(self, weight: Weight, value: Any) -> None:
        """``weight.grad = value``."""
        if value is not None and not issubclass(type(value), Tensor):
            raise UnknownValueError("no gradient")
        self._weights[id(weight.parameter)] = weight.parameter
        self._values[id(weight.parameter)] = value

    def bad(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Those that are not finite now."""
        found = ((self._weights[key], x) for key, x in self._values.items() if x is not None)
        return [(p, x) for p, x in found if badness(x)]

    def attribute(self, tracer: Tracer, weight: Weight, name: str, copied: Callable[[], Tensor]) -> Any:
        """``weight.name``."""
        if name == "grad":
            return self.of(tracer, weight)
        if name in _PLAIN:
            return getattr(weight.parameter, name)
        if name.startswith("_"):
            raise UnknownValueError(name)
        return weight if name == "data" else guarded(getattr, copied(), name)

    def aliased(self, tracer: Tracer, value: Tensor) -> Tensor | None:
        """The gradient of which ``value`` is the memory, where it is known as it was."""
        key = storage_key(value)
        for p in self._before if key is not None else ():
            grad = p.grad
            if (
                isinstance(p, nn.Parameter)
                and grad is not None
                and grad.shape == value.shape
                and storage_key(grad) == key
            ):
                return self.of(tracer, Weight(p))
        return None


def listed(function: Any, owner: Any, args: list[Any], kwargs: dict[str, Any]) -> list[Any] | None:
    """``model.parameters()`` and ``model.named_parameters()``; null for any other call."""
    name = getattr(function, "__name__", "")
    kind = type(owner)
    if args or kwargs or name not in _LISTS or not issubclass(kind, nn.Module):
        return None
    if any(inspect.getattr_static(kind, n, None) is not inspect.getattr_static(nn.Module, n, None) for n in _WALKS):
        return None
    if name == "parameters":
        return [_shown(p) for p in static.parameters(owner)]
    return [(n, _shown(p)) for n, p in static.named_parameters(owner)]


def _shown(p: Tensor) -> Any:
    if type(p) is not nn.Parameter:
        raise UnknownValueError("a weight of another kind")
    return Weight(p)
