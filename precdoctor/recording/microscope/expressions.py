"""Evaluating expressions of the user's source text that only compute: arithmetic, torch's functions, tensor methods.

No code of the user's runs. A name stands for the value its variable had; functions of the user's are followed through
their own text (``functions.py``). Whatever might touch the outside world, draw random numbers or be changed by being
looked at cannot be evaluated, and ends the expression it stands in (:class:`UnknownValueError`).
"""

from __future__ import annotations

import ast
import inspect
import operator
import types
import weakref
from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from precdoctor.recording import attach, leaves
from precdoctor.recording.microscope.frames import Line
from precdoctor.recording.microscope.tracer import External, Tracer
from precdoctor.recording.variables import DROPPED, Held


class UnknownValueError(Exception):
    """An expression that cannot be evaluated without running code that is not only arithmetic."""


#: Expressions and statements evaluated at most: a loop of the user's may be long.
_BUDGET = 20_000
#: Elements of a list or a dictionary of the user's.
_MAX_ELEMENTS = 4096
_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.MatMult: operator.matmul,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
    ast.Invert: operator.invert,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_BUILTINS = {
    f.__name__: f
    for f in (len, float, int, bool, abs, min, max, sum, range, enumerate, zip, reversed, list, tuple, dict, sorted)
} | {f.__name__: f for f in (isinstance, round, pow, slice, any, all, str)}
_DATA = (int, float, complex, bool, str, type(None), slice, Tensor, list, tuple, dict, range, torch.dtype, torch.device)
#: torch's functions that draw, store, set or switch something, by how their names begin.
_IMPURE = (
    *("rand", "normal", "bernoulli", "multinomial", "poisson", "binomial", "sample", "rsample", "gumbel_softmax"),
    *("rrelu", "empty", "new_empty", "init", "seed", "manual_seed", "set_", "save", "load", "compile", "share_"),
    *("backward", "register", "requires_grad", "retain", "from_file", "use_", "resize_"),
)
_PURE_MODULES = (
    *("torch._C", "torch.functional", "torch.nn.functional", "torch._tensor", "torch.special", "torch.linalg"),
    *("torch.fft", "torch.distributions", "torch._jit_internal", "torch._VF", "torch.utils._contextlib"),
)


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
    """

    def __init__(
        self,
        tracer: Tracer,
        file: str,
        values: MutableMapping[str, Any] | Mapping[str, Any],
        follow: Callable[[Any, list[Any], dict[str, Any]], Any],
        above: Evaluator | None = None,
    ) -> None:
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
        if self._left[0] < 0:
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
                    found += list(self.items(self.value(node.value)))
                else:
                    found.append(self.value(node))
            except UnknownValueError as unknown:  # noqa: PERF203 - each by itself
                error = unknown
        if error is not None:
            self.loose += [x for x in found if isinstance(x, Tensor)]
            raise error
        return found

    # --- leaves ------------------------------------------------------------------------------------------------------

    def _constant(self, node: ast.Constant) -> Any:
        return node.value

    def _name(self, node: ast.Name) -> Any:
        if node.id in self._values:
            return self.noted(node.id, self._values[node.id])
        if node.id in _BUILTINS:
            return _BUILTINS[node.id]
        raise UnknownValueError(node.id)

    def noted(self, name: str, value: Any) -> Any:
        """A variable's value; tensors from before are copied, and the tracer told of their name."""
        if isinstance(value, weakref.ref) and (value := value()) is None:
            raise UnknownValueError(name)
        if value is DROPPED:
            raise UnknownValueError(name)
        if isinstance(value, Held):
            if leaves.version(value.value) != value.version:
                raise UnknownValueError(f"{name} was written to")
            value = value.value
        elif isinstance(value, Tensor) and any(value is x for x in self._copies.values()):
            return value
        if isinstance(value, Tensor) and name not in self.assigned:
            if value.grad_fn is not None:
                raise UnknownValueError(f"{name} has a graph")  # which says where it came from
            return self._copy(name, value)
        if type(value) in (list, tuple, dict) and name not in self.assigned and len(value) > _MAX_ELEMENTS:
            raise UnknownValueError(f"{name} is long")
        if type(value) in (list, tuple) and name not in self.assigned:
            return type(value)(self.noted(name, v) for v in value)
        if type(value) is dict and name not in self.assigned:
            return {k: self.noted(name, v) for k, v in value.items()}
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
        if isinstance(owner, types.ModuleType):
            if not hasattr(owner, name):
                raise UnknownValueError(name)
            return self.noted(name, getattr(owner, name))
        if isinstance(owner, Tensor) or type(owner).__module__.startswith("torch.distributions"):
            if name in {"grad", "data_ptr"} or name.startswith("_"):
                raise UnknownValueError(name)
            self.at(node)
            return getattr(owner, name)
        if isinstance(owner, _DATA):
            return getattr(owner, name)
        return self._own_attribute(owner, name)

    def _own_attribute(self, owner: Any, name: str) -> Any:
        """An attribute that is simply there: properties are code."""
        places = [vars(owner)] if hasattr(owner, "__dict__") else []
        places += [owner._parameters, owner._buffers, owner._modules] if isinstance(owner, nn.Module) else []
        for place in places:
            if name in place:
                return self.noted(f"self.{name}", place[name])
        found = inspect.getattr_static(type(owner), name, None)
        if isinstance(found, staticmethod):
            return found.__func__
        if isinstance(found, types.FunctionType):
            return Bound(found, owner)
        if found is None or not isinstance(found, _DATA):
            raise UnknownValueError(name)
        return self.noted(name, found)

    # --- arithmetic --------------------------------------------------------------------------------------------------

    def _apply(self, node: ast.expr, kind: ast.AST, operands: list[Any]) -> Any:
        if not all(isinstance(x, _DATA) for x in operands) and not isinstance(kind, (ast.Is, ast.IsNot)):
            raise UnknownValueError("an object of the user's")
        self.at(node)
        return guarded(_OPERATORS[type(kind)], *operands)

    def _binop(self, node: ast.BinOp) -> Any:
        return self._apply(node, node.op, self.all_of([node.left, node.right]))

    def _unaryop(self, node: ast.UnaryOp) -> Any:
        return self._apply(node, node.op, [self.value(node.operand)])

    def _compare(self, node: ast.Compare) -> Any:
        left, *others = self.all_of([node.left, *node.comparators])
        result: Any = True
        for kind, right in zip(node.ops, others, strict=True):
            result = self._apply(node, kind, [left, right])
            if len(others) > 1 and not guarded(bool, result):
                return False
            left = right
        return result

    def _boolop(self, node: ast.BoolOp) -> Any:
        result: Any = None
        for each in node.values:
            result = self.value(each)
            if guarded(bool, result) is isinstance(node.op, ast.Or):
                return result
        return result

    def _ifexp(self, node: ast.IfExp) -> Any:
        return self.value(node.body if guarded(bool, self.value(node.test)) else node.orelse)

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
        if not isinstance(owner, (Tensor, torch.Size)) and type(owner) not in (list, tuple, dict, str, range):
            raise UnknownValueError("an object of the user's")
        self.at(node)
        return guarded(operator.getitem, owner, index)

    def _listcomp(self, node: ast.ListComp | ast.GeneratorExp) -> Any:
        if len(node.generators) != 1:
            raise UnknownValueError("nested loops")
        loop = node.generators[0]
        found = []
        for item in self.items(self.value(loop.iter)):
            self.assign(loop.target, item)
            if all(guarded(bool, self.value(test)) for test in loop.ifs):
                found.append(self.value(node.elt))
        return found

    _generatorexp = _listcomp

    def items(self, value: Any) -> Any:
        """What a loop over ``value`` runs through."""
        if isinstance(value, (list, tuple, dict, range, str, enumerate, zip, Tensor, type(reversed([])))) or type(
            value
        ).__name__ in {"dict_items", "dict_keys", "dict_values", "range_iterator"}:
            return value
        raise UnknownValueError("a loop over an object of the user's")

    def assign(self, target: ast.expr, value: Any) -> None:
        """``target = value``: names, tuples of them, and elements of what was made here."""
        if isinstance(target, ast.Name):
            self.assigned[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            values = list(guarded(tuple, value))
            if len(values) != len(target.elts) or any(isinstance(t, ast.Starred) for t in target.elts):
                raise UnknownValueError("unpacking")
            for each, one in zip(target.elts, values, strict=True):
                self.assign(each, one)
        elif isinstance(target, ast.Subscript):
            owner, index = self.all_of([target.value, target.slice])
            if not isinstance(owner, (Tensor, list, dict)):
                raise UnknownValueError("an object of the user's")
            self.at(target)
            guarded(operator.setitem, owner, index, value)
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
        if isinstance(function, nn.Module):
            return self._module(node, function, args, kwargs)
        if is_pure(function) and "out" not in kwargs:
            self.at(node)
            return guarded(function, *args, **kwargs)
        if isinstance(function, types.MethodType) and isinstance(function.__func__, types.FunctionType):
            function = Bound(function.__func__, function.__self__)
        try:
            return self._follow(function, args, kwargs)
        except UnknownValueError:
            self.loose += [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            raise

    def _callee_and_arguments(self, node: ast.Call) -> tuple[Any, list[Any], dict[str, Any]]:
        try:
            function = self.value(node.func)
        except UnknownValueError:
            self.loose += [x for x in self._call_arguments(node)[0] if isinstance(x, Tensor)]
            raise
        return function, *self._call_arguments(node)

    def _module(self, node: ast.Call, module: nn.Module, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Modules without parameters only: what others came to is known from their replay."""
        if next(module.parameters(), None) is not None or "Dropout" in type(module).__name__:
            self.loose += [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            raise UnknownValueError("a module")
        if type(module).__module__.startswith("torch.nn.modules"):
            self.at(node)
            return guarded(module.forward, *args, **kwargs)
        return self._follow(self._own_attribute(module, "forward"), args, kwargs)


def is_pure(function: Any) -> bool:
    """Whether a function only computes: Python's, ``math``'s and torch's, without those that draw or set something."""
    if any(function is known for known in _BUILTINS.values()) or getattr(function, "__module__", None) == "math":
        return True
    name = str(getattr(function, "__name__", ""))
    if name.startswith(_IMPURE) or "dropout" in name:
        return False
    owner = getattr(function, "__self__", None)
    if isinstance(owner, (Tensor, list, dict, str, tuple)) or type(owner).__module__.startswith("torch.distributions"):
        return True
    if isinstance(function, types.BuiltinFunctionType):
        return getattr(torch, name, None) is function or str(function.__module__).startswith(_PURE_MODULES)
    module = str(getattr(function, "__module__", ""))
    if isinstance(function, type):
        return module.startswith("torch.distributions") or function in {torch.finfo, torch.iinfo, torch.Size}
    return isinstance(function, types.FunctionType) and module.startswith(_PURE_MODULES)


def guarded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Its result; what it raises of itself makes the value unknown."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        attach.let_through(error)
        raise UnknownValueError(f"{type(error).__name__}: {error}") from error
