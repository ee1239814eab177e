"""Values and functions that can be computed with and are no code of the user's: all that evaluated text may use.

Types are asked for, never objects: ``__class__``, ``__bool__``, ``__len__``, ``__iter__``, ``__eq__`` and
``__getattr__`` of the user's objects may draw random numbers, read on in a stream, or load what was to be loaded later.
"""

from __future__ import annotations

import ast
import copy
import math
import operator
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from precdoctor.recording.process import attach


class UnknownValueError(Exception):
    """An expression that cannot be evaluated without running code that is not only arithmetic."""


#: Elements of a list or a dictionary of the user's, and lists in one another.
MAX_ELEMENTS, _MAX_NEST = 4096, 4
BUILTINS: dict[str, Any] = {
    f.__name__: f
    for f in (len, float, int, bool, abs, min, max, sum, range, enumerate, zip, reversed, list, tuple, dict, sorted)
} | {f.__name__: f for f in (isinstance, round, pow, slice, any, all, str)}
_PLAIN = frozenset(
    (
        *(int, float, complex, bool, str, type(None), slice, range, type(...)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.finfo, torch.iinfo),
    )
)
#: Stand for data; whoever computes with one gets what it stands for.
PLACEHOLDERS: set[type] = set()
_TENSORS = frozenset((Tensor, nn.Parameter))
_VIEWS: frozenset[type] = frozenset((type({0: 0}.items()), type({0: 0}.keys()), type({0: 0}.values())))
#: Whoever runs through one of these uses it up.
ITERATORS = frozenset((zip, enumerate, reversed, type(reversed([])), type(iter(range(0)))))
_FUNCTIONS = frozenset(
    (
        *(types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.MethodDescriptorType),
        *(types.WrapperDescriptorType, types.MethodWrapperType, type),
    )
)
#: torch's functions that draw, store, set or switch something, by how their names begin.
_IMPURE = (
    *("rand", "normal", "bernoulli", "multinomial", "poisson", "binomial", "sample", "rsample", "gumbel_softmax"),
    *("rrelu", "empty", "new_empty", "init", "seed", "manual_seed", "set_", "save", "load", "compile", "share_"),
    *("backward", "register", "requires_grad", "retain", "from_file", "use_", "resize_", "apply_", "map_", "_"),
)
_DRAWING = (
    *(torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.randint, torch.randperm),
    *(torch.normal, torch.bernoulli),
)
_PURE_MODULES = (
    *("torch._C", "torch.functional", "torch.nn.functional", "torch._tensor", "torch.special", "torch.linalg"),
    *("torch.fft", "torch.distributions", "torch._jit_internal", "torch._VF", "torch.utils._contextlib"),
)


#: What the operators of the language do.
OPERATORS: dict[type, Callable[..., Any]] = {
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


IN_PLACE: dict[type, Callable[..., Any]] = {
    kind: getattr(operator, f"i{f.__name__.strip('_')}")
    for kind, f in OPERATORS.items()
    if hasattr(operator, f"i{f.__name__.strip('_')}") and issubclass(kind, ast.operator)
}


def instead_of(function: Any) -> Any:
    """Memory that is only reserved holds anything; here it holds zeros."""
    if function is torch.empty_like:
        return torch.zeros_like
    return torch.zeros if function is torch.empty else function


def is_data(value: Any, depth: int = 0) -> bool:
    """Whether it is numbers, strings, torch's tensors and distributions, or a nest of such."""
    kind = type(value)
    if kind in _PLAIN or kind in _TENSORS or kind in ITERATORS or kind in PLACEHOLDERS:
        return True
    if is_distribution(value):
        return True
    if kind is dict:
        return is_data(tuple(value), depth) and is_data(tuple(value.values()), depth)
    if kind in {list, tuple, set, frozenset} or kind in _VIEWS or kind.__module__ == "torch.return_types":
        return depth < _MAX_NEST and len(value) <= MAX_ELEMENTS and all(is_data(v, depth + 1) for v in value)
    return kind.__module__ == "numpy" and kind.__name__.startswith(("float", "int", "uint", "bool"))


def is_distribution(value: Any) -> bool:
    """Whether it is one of torch's own."""
    return type(value).__module__.startswith("torch.distributions")


def copied(distribution: Any) -> Any:
    """The same distribution: what it computes when asked for the first time is not to be found in the user's."""
    twin = copy.copy(distribution)
    own = vars(twin)
    own.update({name: copied(part) for name, part in own.items() if is_distribution(part)})
    return twin


def truth(value: Any) -> bool:
    """``bool(value)``.

    Raises:
        UnknownValueError: that is for the user's code to say, or undefined.
    """
    if not is_data(value):
        raise UnknownValueError("an object of the user's")
    return bool(guarded(bool, value))


def items(value: Any) -> Any:
    """What a loop over ``value`` runs through.

    Raises:
        UnknownValueError: an object of the user's, which may be used up by that.
    """
    if is_data(value):
        return guarded(iter, value)
    raise UnknownValueError("a loop over an object of the user's")


def unpacked(targets: list[ast.expr], values: list[Any]) -> list[Any]:
    """What each target of ``a, *b = values`` gets.

    Raises:
        UnknownValueError: there are more or fewer values than targets.
    """
    starred = next((i for i, t in enumerate(targets) if isinstance(t, ast.Starred)), None)
    if starred is not None and len(values) >= len(targets) - 1:
        after = len(values) - (len(targets) - 1 - starred)
        return [*values[:starred], values[starred:after], *values[after:]]
    if len(values) != len(targets):
        raise UnknownValueError("unpacking")
    return values


def is_pure(function: Any) -> bool:
    """Whether a function only computes: Python's, ``math``'s and torch's, without those that draw or set something."""
    if any(function is known for known in BUILTINS.values()):
        return True
    if type(function) not in _FUNCTIONS:
        return False
    if getattr(function, "__module__", None) == math.__name__:
        return True
    name = str(getattr(function, "__name__", ""))
    if name.startswith(_IMPURE) or "dropout" in name:
        return False
    owner = getattr(function, "__self__", None)
    if type(owner) in _TENSORS or type(owner) in {list, dict, str, tuple, torch.Size} or is_distribution(owner):
        return True
    if isinstance(function, types.BuiltinFunctionType):
        return getattr(torch, name, None) is function or str(function.__module__).startswith(_PURE_MODULES)
    module = str(getattr(function, "__module__", ""))
    if isinstance(function, type):
        return module.startswith("torch.distributions") or function in {torch.finfo, torch.iinfo, torch.Size}
    return isinstance(function, types.FunctionType) and module.startswith(_PURE_MODULES)


def draws(function: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function draws from torch's own generators, and does nothing else."""
    return kwargs.get("generator") is None and any(function is known for known in _DRAWING)


def may_be_given(function: Any, args: list[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a pure function runs no code of the user's when it is called with this."""
    if function is isinstance:
        kinds = args[1] if len(args) == 2 and type(args[1]) is tuple else args[1:]
        return bool(args) and is_data(args[0]) and all(type(k) in {type, type(Tensor)} for k in kinds)
    return all(is_data(x) for x in (*args, *kwargs.values()))


def guarded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Its result; what it raises of itself makes the value unknown."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        attach.let_through(error)
        raise UnknownValueError(f"{type(error).__name__}: {error}") from error
