"""Evaluating expressions of the user's source text that only compute: arithmetic, torch's functions, tensor methods.

No code of the user's runs but modules in evaluation, as in any replay. A name stands for the value its variable had;
functions of the user's are followed through their own text (``functions.py``). Whatever might touch the outside world,
draw random numbers or be changed by being looked at cannot be evaluated, and ends the expression it stands in
(:class:`UnknownValueError`).
"""

from __future__ import annotations

import ast
import inspect
import operator
import time
import types
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from precdoctor.recording import leaves
from precdoctor.recording.microscope.frames import Line
from precdoctor.recording.microscope.pure import (
    BUILTINS,
    ITERATORS,
    MAX_ELEMENTS,
    OPERATORS,
    UnknownValueError,
    copied,
    guarded,
    instead_of,
    is_data,
    is_distribution,
    is_pure,
    items,
    may_be_given,
    truth,
    unpacked,
)
from precdoctor.recording.microscope.teachers import called_again
from precdoctor.recording.microscope.tracer import External, Tracer
from precdoctor.recording.microscope.weights import Gradients, Weight, listed
from precdoctor.recording.variables import DROPPED, Held

#: Expressions and statements evaluated at most: a loop of the user's may be long.
_BUDGET = 20_000


@dataclass(frozen=True)
class Bound:
    """A method of the user's and its object."""

    function: types.FunctionType
    owner: Any


class Evaluator:
    """Evaluates expressions under a tracer, which notes every tensor operation with its line.

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
        above: Evaluator | None = None,
        gradients: Gradients | None = None,
    ) -> None:
        self.gradients: Gradients | None = above.gradients if above is not None else gradients
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
        found = [self._computable(x) for x in found]
        if error is not None:
            self.loose += [x for x in found if issubclass(type(x), Tensor)]
            raise error
        return found

    def _computable(self, value: Any) -> Any:
        """A weight that is computed with is a copy of it."""
        return self._copy("weight", value.parameter) if type(value) is Weight else value

    # --- leaves ------------------------------------------------------------------------------------------------------

    def _constant(self, node: ast.Constant) -> Any:
        return node.value

    def _name(self, node: ast.Name) -> Any:
        if node.id in self._values:
            return self.noted(node.id, self._values[node.id])
        if node.id in BUILTINS:
            return BUILTINS[node.id]
        raise UnknownValueError(node.id)

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
            if not is_data(value) or (leaves.has_graph(value) and self.gradients is None):
                raise UnknownValueError(f"{name} has a graph, or computes by itself")  # a graph says where it came from
            alias = self.gradients.aliased(self.tracer, value) if self.gradients is not None else None
            return self._copy(name, value) if alias is None else alias
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
            if leaves.version(value.value) != value.version:
                raise UnknownValueError(f"{name} was written to")
            return value.value
        return value

    def _copy(self, name: str, x: Tensor) -> Tensor:
        if id(x) not in self._copies:
            with self.tracer.aside():
                self._copies[id(x)] = x.detach().clone()
            self.tracer.note(self._copies[id(x)], External("variable", name))
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

    # --- arithmetic --------------------------------------------------------------------------------------------------

    def _apply(self, node: ast.expr, kind: ast.AST, operands: list[Any]) -> Any:
        if not all(map(is_data, operands)) and not isinstance(kind, (ast.Is, ast.IsNot)):
            raise UnknownValueError("an object of the user's")
        self.at(node)
        return guarded(OPERATORS[type(kind)], *operands)

    def _binop(self, node: ast.BinOp) -> Any:
        return self._apply(node, node.op, self.all_of([node.left, node.right]))

    def _unaryop(self, node: ast.UnaryOp) -> Any:
        return self._apply(node, node.op, [self.value(node.operand)])

    def _compare(self, node: ast.Compare) -> Any:
        left, *others = self.all_of([node.left, *node.comparators])
        result: Any = True
        for kind, right in zip(node.ops, others, strict=True):
            result = self._apply(node, kind, [left, right])
            if len(others) > 1 and not truth(result):
                return False
            left = right
        return result

    def _boolop(self, node: ast.BoolOp) -> Any:
        result: Any = None
        for each in node.values:
            result = self.value(each)
            if truth(result) is isinstance(node.op, ast.Or):
                return result
        return result

    def _ifexp(self, node: ast.IfExp) -> Any:
        return self.value(node.body if truth(self.value(node.test)) else node.orelse)

    def _tuple(self, node: ast.Tuple) -> Any:
        return tuple(self.all_of(node.elts))

    def _list(self, node: ast.List) -> Any:
        return self.all_of(node.elts)

    def _dict(self, node: ast.Dict) -> Any:
        if any(k is None for k in node.keys):
            raise UnknownValueError("**")
        keys = self.all_of([k for k in node.keys if k is not None])
        return dict(zip(keys, self.all_of(node.values), strict=True))

    def _slice(self, node: ast.Slice) -> Any:
        return slice(*(None if x is None else self.value(x) for x in (node.lower, node.upper, node.step)))

    def _subscript(self, node: ast.Subscript) -> Any:
        owner, index = self.all_of([node.value, node.slice])
        whole = type(owner) in (list, tuple, dict)  # what else is in it does not matter
        if not (whole or is_data(owner)) or not is_data(index):
            raise UnknownValueError("an object of the user's")
        self.at(node)
        return guarded(operator.getitem, owner, index)

    def _listcomp(self, node: ast.ListComp | ast.GeneratorExp) -> Any:
        return [self.value(node.elt) for _ in self._rounds(node.generators)]

    def _dictcomp(self, node: ast.DictComp) -> Any:
        pairs = [self.all_of([node.key, node.value]) for _ in self._rounds(node.generators)]
        if not is_data([key for key, _ in pairs]):
            raise UnknownValueError("an object of the user's")
        return dict(pairs)

    def _rounds(self, loops: list[ast.comprehension]) -> Iterator[None]:
        if not loops:
            yield
            return
        for item in items(self.value(loops[0].iter)):
            self.assign(loops[0].target, item)
            if all(truth(self.value(test)) for test in loops[0].ifs):
                yield from self._rounds(loops[1:])

    _generatorexp = _listcomp

    def assign(self, target: ast.expr, value: Any) -> None:
        """``target = value``: names, tuples of them, and elements of what was made here."""
        if isinstance(target, ast.Name):
            self.assigned[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            values = list(value) if type(value) in (list, tuple) else list(items(value))
            for each, one in zip(target.elts, unpacked(target.elts, values), strict=True):
                self.assign(each.value if isinstance(each, ast.Starred) else each, one)
        elif isinstance(target, ast.Subscript):
            owner, index = self.all_of([target.value, target.slice])
            if type(owner) not in (Tensor, list, dict) or not (is_data(index) and is_data(value)):
                raise UnknownValueError("an object of the user's")
            self.at(target)
            guarded(operator.setitem, owner, index, value)
        elif isinstance(target, ast.Attribute) and target.attr == "grad" and self.gradients is not None:
            weight = self.value(target.value)
            if type(weight) is not Weight:
                raise UnknownValueError("the gradient of something else")
            self.gradients.put(weight, value)
        else:
            raise UnknownValueError("an attribute is written to")

    # --- calls -------------------------------------------------------------------------------------------------------

    def _call_arguments(self, node: ast.Call) -> tuple[list[Any], dict[str, Any]]:
        if any(k.arg is None for k in node.keywords):
            raise UnknownValueError("**")
        values = self.all_of([*node.args, *(k.value for k in node.keywords)])
        count = len(values) - len(node.keywords)
        return values[:count], {str(k.arg): v for k, v in zip(node.keywords, values[count:], strict=True)}

    def _call(self, node: ast.Call) -> Any:
        """A call: torch's and Python's pure functions run, those of the user are followed, all others are unknown."""
        function, args, kwargs = self._callee_and_arguments(node)
        if issubclass(type(function), nn.Module):
            return self._module(node, function, args, kwargs)
        function = instead_of(function)
        if is_pure(function):  # ``out``, too, is a copy here
            if not may_be_given(function, args, kwargs):
                raise UnknownValueError("an object of the user's")
            self.at(node)
            return guarded(function, *args, **kwargs)
        if type(function) is types.MethodType and type(function.__func__) is types.FunctionType:
            function = Bound(function.__func__, function.__self__)
        if type(function) is Bound and self.gradients is not None:
            weights = listed(function.function, function.owner, args, kwargs)
            if weights is not None:
                return weights
        try:
            return self._follow(function, args, kwargs)
        except UnknownValueError:
            self.loose += [x for x in (*args, *kwargs.values()) if issubclass(type(x), Tensor)]
            raise

    def _callee_and_arguments(self, node: ast.Call) -> tuple[Any, list[Any], dict[str, Any]]:
        try:
            function = self.value(node.func)
        except UnknownValueError:
            self.loose += [x for x in self._call_arguments(node)[0] if issubclass(type(x), Tensor)]
            raise
        return function, *self._call_arguments(node)

    def _module(self, node: ast.Call, module: nn.Module, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Those without parameters, and those in evaluation: what others came to is known from their replay."""
        kind = type(module)
        known = kind.__module__.startswith("torch.nn.modules") and "forward" not in vars(module)
        state = next(module.parameters(), None) is not None or (  # BatchNorm without weights has statistics
            next(module.buffers(), None) is not None and kind.__module__ != "torch.nn.modules.loss"
        )
        if state or "Dropout" in kind.__name__ or (known and next(module.children(), None) is not None):
            self.loose += [x for x in (*args, *kwargs.values()) if issubclass(type(x), Tensor)]
            if may_be_given(module, args, kwargs):
                return called_again(self.tracer, module, args, kwargs)
            raise UnknownValueError("a module")
        if known and may_be_given(kind.forward, args, kwargs):
            self.at(node)
            return guarded(kind.forward, module, *args, **kwargs)
        return self._follow(self._own_attribute(module, "forward"), args, kwargs)
