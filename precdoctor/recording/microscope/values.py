"""The values that names and attributes in evaluated text stand for: copies of the user's tensors, never those."""

from __future__ import annotations

import ast
import inspect
import time
import types
import weakref
from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from precdoctor.recording.microscope import transforms
from precdoctor.recording.microscope.pure import (
    BUILTINS,
    ITERATORS,
    MAX_ELEMENTS,
    UnknownValueError,
    copied,
    guarded,
    is_data,
    is_distribution,
    items,
)
from precdoctor.recording.microscope.tracer import External, Tracer
from precdoctor.recording.microscope.weights import Gradients, Weight
from precdoctor.recording.model import tensor_leaves
from precdoctor.recording.ops.source_lines import Line
from precdoctor.recording.scene.local_variables import DROPPED, Held

if TYPE_CHECKING:
    from precdoctor.recording.microscope.outward import Outputs

#: Expressions and statements evaluated at most: a loop of the user's may be long.
_BUDGET = 20_000


@dataclass(frozen=True)
class Bound:
    """A method of the user's and its object."""

    function: types.FunctionType
    owner: Any


class Values:
    """Names, attributes and constants; what is done with them is for :class:`expressions.Evaluator` to say.

    Args:
        file: of the expressions, as frames spell it.
        values: variables as they were noted.
        follow: follows a call of a function of the user's.
        above: the evaluator of the calling function.
        gradients: what ``.grad`` of weights is; without, nothing that has to do with gradients can be evaluated.
    """

    def __init__(
        self,
        tracer: Tracer,
        file: str,
        values: MutableMapping[str, Any] | Mapping[str, Any],
        follow: Callable[[Any, list[Any], dict[str, Any]], Any],
        above: Values | None = None,
        gradients: Gradients | None = None,
    ) -> None:
        self.gradients: Gradients | None = above.gradients if above is not None else gradients
        #: Random numbers may be drawn, as long as whoever allows it puts the generators back.
        self.draws: bool = above.draws if above is not None else False
        #: What calls of top-level modules came to in the run, for text that is evaluated from the outside inwards.
        self.outputs: Outputs | None = above.outputs if above is not None else None
        #: Makes a variable of this function again whose value is unknown; whether that worked.
        self.remake: Callable[[str], bool] = lambda _name: False
        self.tracer = tracer
        self.file = file
        #: What has been assigned since, before what was noted.
        self.assigned: dict[str, Any] = {}
        self._values = ChainMap(self.assigned, values)  # type: ignore[arg-type] # never written to
        self._follow = follow
        self._left: list[int] = above._left if above is not None else [_BUDGET]
        #: Copies of noted tensors, by ``id``: in-place operations must not reach the originals.
        self._copies: dict[int, Tensor] = above._copies if above is not None else {}
        #: Tensors that entered an expression that could not be evaluated, in order.
        self.loose: list[Tensor] = above.loose if above is not None else []

    def value(self, node: ast.expr) -> Any:
        """The expression's value.

        Raises:
            UnknownValueError: it cannot be evaluated.
        """
        self.spend()
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is None:
            raise UnknownValueError(type(node).__name__)
        return method(node)

    def spend(self) -> None:
        """One step of work."""
        self._left[0] -= 1
        if self._left[0] < 0 or time.monotonic() > self.tracer.until:
            raise UnknownValueError("too long")

    def at(self, node: ast.expr | ast.stmt) -> None:
        """What is computed next belongs to this line."""
        self.tracer.line = Line(self.file, node.lineno)

    def all_of(self, nodes: list[ast.expr]) -> list[Any]:
        """The values of all of them; where one is unknown, the others are evaluated all the same."""
        found: list[Any] = []
        error: UnknownValueError | None = None
        for node in nodes:
            try:
                if isinstance(node, ast.Starred):
                    found += list(items(self.value(node.value)))
                else:
                    found.append(self.value(node))
            except UnknownValueError as unknown:  # noqa: PERF203 - each by itself
                error = unknown
        found = [self._computable(x) if type(x) is Weight else x for x in found]
        if error is not None:
            self.loose += [x for x in found if issubclass(type(x), Tensor)]
            raise error
        return found

    def _computable(self, value: Any) -> Any:
        """A weight that is computed with is a copy of it."""
        if type(value) is Weight:
            return self._copy(External("weight"), value.parameter)
        if type(value) in (list, tuple):
            return type(value)(map(self._computable, value))
        return {k: self._computable(v) for k, v in value.items()} if type(value) is dict else value

    # --- leaves ------------------------------------------------------------------------------------------------------

    def _constant(self, node: ast.Constant) -> Any:
        return node.value

    def _name(self, node: ast.Name) -> Any:
        if node.id not in self._values and node.id in BUILTINS:
            return BUILTINS[node.id]
        try:
            return self._variable(node.id)
        except UnknownValueError:
            if not self.remake(node.id):
                raise
        return self._variable(node.id)

    def _variable(self, name: str) -> Any:
        if name not in self._values:
            raise UnknownValueError(name)
        return self.noted(name, self._values[name])

    def is_object(self, name: str) -> bool:
        """Whether a variable is an object of the user's, of which only the identity counts."""
        value = self._values.get(name, DROPPED)
        value = value() if type(value) is weakref.ref else value
        return not (value is DROPPED or type(value) is Held or is_data(value))

    def noted(self, name: str, value: Any) -> Any:
        """A variable's value; tensors from before are copied, and the tracer told of their name."""
        old = name not in self.assigned
        value = self._resolved(name, value)
        kind = type(value)
        if not old or any(value is x for x in self._copies.values()):
            return value
        if issubclass(kind, Tensor):
            if kind is nn.Parameter and self.gradients is not None:
                return Weight(value)
            if not is_data(value) or (tensor_leaves.has_graph(value) and self.gradients is None):
                raise UnknownValueError(f"{name} has a graph, or computes by itself")  # a graph says where it came from
            alias = self.gradients.aliased(self.tracer, value) if self.gradients is not None else None
            return self._copy(External("variable", name), value) if alias is None else alias
        if kind in ITERATORS:
            raise UnknownValueError(f"{name} would be used up")
        if is_distribution(value):
            return copied(value)
        if kind in (list, tuple, dict) and len(value) > MAX_ELEMENTS:
            raise UnknownValueError(f"{name} is long")
        if kind in (list, tuple):
            return kind(self.noted(name, v) for v in value)
        if kind is dict:
            if not is_data(tuple(value)):
                raise UnknownValueError(f"{name} has objects of the user's for keys")
            return {k: self.noted(name, v) for k, v in value.items()}
        return value

    def _resolved(self, name: str, value: Any) -> Any:
        """What a weak reference or a note stands for."""
        if type(value) is weakref.ref and (value := value()) is None:
            raise UnknownValueError(name)
        if value is DROPPED:
            raise UnknownValueError(name)
        if type(value) is Held:
            if tensor_leaves.version(value.value) != value.version:
                raise UnknownValueError(f"{name} was written to")
            return value.value
        return value

    def _copy(self, what: External, x: Tensor) -> Tensor:
        if id(x) not in self._copies:
            with self.tracer.aside(), transforms.outside():
                self._copies[id(x)] = x.detach().clone()
            self.tracer.note(self._copies[id(x)], what)
        return self._copies[id(x)]

    def _attribute(self, node: ast.Attribute) -> Any:
        owner = self.value(node.value)
        name = node.attr
        if issubclass(type(owner), types.ModuleType):
            there = object.__getattribute__(owner, "__dict__")
            if name not in there:
                raise UnknownValueError(name)  # to be loaded when it is asked for
            return self.noted(name, there[name])
        if type(owner) is Bound:
            raise UnknownValueError(name)
        if type(owner) is Weight and self.gradients is not None:
            return self.gradients.attribute(self.tracer, owner, name, lambda: self._computable(owner))
        if is_data(owner) and (type(owner) in {Tensor, nn.Parameter} or is_distribution(owner)):
            if name in {"grad", "data_ptr"} or name.startswith("_"):
                raise UnknownValueError(name)
            self.at(node)
            return guarded(getattr, owner, name)
        if is_data(owner):
            return guarded(getattr, owner, name)
        return self._own_attribute(owner, name)

    def _own_attribute(self, owner: Any, name: str) -> Any:
        """An attribute that is simply there: properties are code."""
        found = inspect.getattr_static(type(owner), name, None)
        if type(found) is property:
            raise UnknownValueError(name)
        try:
            places = [object.__getattribute__(owner, "__dict__")]
        except (AttributeError, TypeError):
            places = []
        if issubclass(type(owner), nn.Module):
            places += [places[0].get(kind) or {} for kind in ("_parameters", "_buffers", "_modules")]
        for place in places:
            if name in place:
                return self.noted(f"self.{name}", place[name])
        if isinstance(found, staticmethod):
            return found.__func__
        if isinstance(found, types.FunctionType):
            return Bound(found, owner)
        if found is None or not is_data(found):
            raise UnknownValueError(name)
        return self.noted(name, found)
