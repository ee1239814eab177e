"""Evaluating expressions of the user's source text that only compute: arithmetic, torch's functions, tensor methods.

No code of the user's runs but modules in evaluation, as in any replay. A name stands for the value its variable had;
functions of the user's are followed through their own text (``functions.py``). Whatever might touch the outside world,
draw random numbers or be changed by being looked at cannot be evaluated, and ends the expression it stands in
(:class:`UnknownValueError`).
"""

from __future__ import annotations

import ast
import operator
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from precdoctor.recording.microscope import transforms
from precdoctor.recording.microscope.pure import (
    OPERATORS,
    UnknownValueError,
    draws,
    guarded,
    instead_of,
    is_data,
    is_pure,
    items,
    may_be_given,
    truth,
    unpacked,
)
from precdoctor.recording.microscope.teachers import called_again
from precdoctor.recording.microscope.values import Bound, Values
from precdoctor.recording.microscope.weights import Weight, listed
from precdoctor.recording.model import static


class Evaluator(Values):
    """Evaluates expressions under a tracer, which notes every tensor operation with its line."""

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
        if (known := self._output_of(node)) is not None:
            return known
        function, args, kwargs = self._callee_and_arguments(node)
        if issubclass(type(function), nn.Module):
            return self._module(node, function, args, kwargs)
        function = instead_of(function)
        if is_pure(function) or (self.draws and draws(function, kwargs)):  # ``out``, too, is a copy here
            if not may_be_given(function, args, kwargs):
                raise UnknownValueError("an object of the user's")
            self.at(node)
            return guarded(function, *args, **kwargs)
        if type(function) is types.MethodType and type(function.__func__) is types.FunctionType:
            function = Bound(function.__func__, function.__self__)
        if self.gradients is not None and (found := self._transformed(node, function, args, kwargs)) is not None:
            return found
        if type(function) is Bound and self.gradients is not None:
            weights = listed(function.function, function.owner, args, kwargs)
            if weights is not None:
                return weights
        try:
            return self._follow(function, args, kwargs)
        except UnknownValueError:
            self.loose += [x for x in (*args, *kwargs.values()) if issubclass(type(x), Tensor)]
            raise

    def _output_of(self, node: ast.Call) -> Any:
        """What a top-level module gave in the run, whatever it was given; null for other calls."""
        if self.outputs is None or not _is_dotted(node.func):
            return None
        try:
            module = self.value(node.func)
        except UnknownValueError:
            return None
        lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        return self.outputs.of(self.tracer, module, (self.file, lines)) if issubclass(type(module), nn.Module) else None

    def _transformed(self, node: ast.Call, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """What a transform of ``torch.func`` gives, or one itself; null for any other function."""
        if transforms.makes_transform(function, args):
            return guarded(function, *args, **kwargs)
        again = transforms.around(function, self._follow)
        if again is None and function is not torch.func.functional_call:
            return None
        if not is_data(args[again is None :]) or not is_data(kwargs):
            raise UnknownValueError("an object of the user's")
        self.at(node)
        given, named = self._computable(args), self._computable(kwargs)
        if again is None:
            return transforms.functional(self.tracer, given, named)
        return transforms.run(self.tracer, again, given, named)

    def autocast(self, node: ast.Call) -> torch.autocast:
        """The context a call of ``torch.autocast`` makes.

        Raises:
            UnknownValueError: it is a call of something else, or its arguments are unknown.
        """
        kind = self.value(node.func)
        args, kwargs = self._call_arguments(node)
        if type(kind) is not type or not issubclass(kind, torch.autocast) or not is_data((args, kwargs)):
            raise UnknownValueError("autocast")
        made: torch.autocast = guarded(kind, *args, **kwargs)
        return made

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
        known = kind.__module__.startswith("torch.nn.modules") and "forward" not in static.module_dict(module)
        state = next(static.parameters(module), None) is not None or (  # BatchNorm without weights has statistics
            next(static.buffers(module), None) is not None and kind.__module__ != "torch.nn.modules.loss"
        )
        if state or "Dropout" in kind.__name__ or (known and static.held(module, "_modules")):
            self.loose += [x for x in (*args, *kwargs.values()) if issubclass(type(x), Tensor)]
            if may_be_given(module, args, kwargs):
                return called_again(self.tracer, module, args, kwargs)
            raise UnknownValueError("a module")
        if known and may_be_given(kind.forward, args, kwargs):
            self.at(node)
            return guarded(kind.forward, module, *args, **kwargs)
        return self._follow(self._own_attribute(module, "forward"), args, kwargs)


def _is_dotted(node: ast.expr) -> bool:
    """Whether it is a name, or one after the other: ``self.heads.first``."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)
