"""Following functions of the user's through their source text, statement by statement (see ``expressions.py``)."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import linecache
import types
from collections import ChainMap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from precdoctor.recording.microscope.expressions import Evaluator
from precdoctor.recording.microscope.pure import IN_PLACE, OPERATORS, UnknownValueError, guarded, is_data, items, truth
from precdoctor.recording.microscope.tracer import Tracer
from precdoctor.recording.microscope.values import Bound
from precdoctor.recording.microscope.weights import Gradients
from precdoctor.recording.ops.source_lines import is_foreign
from precdoctor.recording.process import attach
from precdoctor.recording.scene.local_variables import DROPPED

#: Calls followed into one another.
_MAX_DEPTH = 8
#: Contexts that change no value.
_CONTEXTS = frozenset(("no_grad", "enable_grad", "inference_mode", "set_grad_enabled", "record_function"))

#: Files of torch whose wrappers run the function as it is: ``@torch.no_grad()``, ``@torch.compile``.
_WRAPPERS = (str(Path("torch", "utils", "_contextlib.py")), str(Path("torch", "_dynamo", "eval_frame.py")))

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module


class _ReturnSignal(Exception):  # noqa: N818 - no error
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class _LoopSignal(Exception):  # noqa: N818 - no error
    def __init__(self, *, ends: bool) -> None:
        super().__init__()
        self.ends = ends


class Follower:
    """Runs statements on noted values; a statement that cannot be evaluated leaves its targets unknown."""

    def __init__(
        self,
        tracer: Tracer,
        file: str,
        values: Mapping[str, Any],
        above: Follower | None = None,
        gradients: Gradients | None = None,
    ) -> None:
        self.evaluator: Evaluator = Evaluator(
            tracer, file, values, self._follow, above.evaluator if above is not None else None, gradients
        )
        self._tracer = tracer
        self._depth: int = above._depth + 1 if above is not None else 0

    def _follow(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if self._depth == _MAX_DEPTH:
            raise UnknownValueError("calls too deep")
        owner = (function.owner,) if type(function) is Bound else ()
        function = function.function if type(function) is Bound else function
        if type(function) is not types.FunctionType:
            raise UnknownValueError("a call")
        while function.__code__.co_filename.endswith(_WRAPPERS) and isinstance(
            inner := getattr(function, "__wrapped__", None), types.FunctionType
        ):
            function = inner  # @torch.no_grad()
        file = function.__code__.co_filename
        body = None if is_foreign(file) else function_of(file, function.__code__)
        if not isinstance(body, ast.FunctionDef) or function.__code__.co_flags & inspect.CO_GENERATOR:
            raise UnknownValueError(function.__name__)
        bound = guarded(inspect.signature(function).bind, *owner, *args, **kwargs)
        bound.apply_defaults()
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        outer = {name: cell.cell_contents for name, cell in cells.items() if cell != types.CellType()}
        inside = Follower(self._tracer, file, ChainMap(outer, function.__globals__), self)
        inside.evaluator.assigned.update(bound.arguments)
        try:
            inside.run(body.body)
        except _ReturnSignal as result:
            return result.value
        except _LoopSignal as signal:
            raise UnknownValueError("a loop") from signal
        return None

    def run(self, statements: list[ast.stmt]) -> None:
        """Execute them.

        Raises:
            UnknownValueError: which way to go is unknown, or what is returned.
        """
        for statement in statements:
            self.evaluator.spend()
            self.step(statement)

    def attempt(self, statement: ast.stmt) -> None:
        """Execute one as far as it can be."""
        with contextlib.suppress(UnknownValueError, _ReturnSignal, _LoopSignal):
            self.step(statement)

    def step(self, statement: ast.stmt) -> None:
        """Execute one."""
        value = self.evaluator.value
        match statement:
            case ast.Assign() | ast.AnnAssign() if statement.value is not None:
                one = [] if isinstance(statement, ast.Assign) else [statement.target]
                self._assign([*(statement.targets if isinstance(statement, ast.Assign) else ()), *one], statement.value)
            case ast.AugAssign():
                self._augment(statement)
            case ast.Expr():
                self._for_effect(statement.value)
            case ast.Return():
                result = None if statement.value is None else value(statement.value)
                raise _ReturnSignal(result)
            case ast.If():
                self.run(statement.body if truth(value(statement.test)) else statement.orelse)
            case ast.For() | ast.While():
                self._loop(statement)
            case ast.With():
                self._with(statement)
            case ast.Break() | ast.Continue():
                raise _LoopSignal(ends=isinstance(statement, ast.Break))
            case ast.Pass() | ast.Assert() | ast.AnnAssign() | ast.Global() | ast.Nonlocal():
                pass
            case _:
                raise UnknownValueError(type(statement).__name__)

    def _assign(self, targets: list[ast.expr], source: ast.expr) -> None:
        try:
            found = self.evaluator.value(source)
            for target in targets:
                self.evaluator.assign(target, found)
        except UnknownValueError:
            for target in targets:
                self._forget(target)

    def _augment(self, statement: ast.AugAssign) -> None:
        try:
            load = ast.copy_location(_loaded(statement.target), statement.target)
            first, second = self.evaluator.all_of([load, statement.value])
            self.evaluator.at(statement)
            does = IN_PLACE if type(first) is Tensor else OPERATORS  # a set may be the user's own
            result = guarded(does[type(statement.op)], first, second) if is_data([first, second]) else DROPPED
            self.evaluator.assign(statement.target, result)
        except UnknownValueError:
            self._forget(statement.target)

    def _forget(self, target: ast.expr) -> None:
        """What is assigned is unknown, and so is a tensor that is written to; other objects stay the same."""
        written = isinstance(target, (ast.Subscript, ast.Attribute))
        for name in names_in(target)[:1] if written else names_in(target):
            if not written or not self.evaluator.is_object(name):
                self.evaluator.assigned[name] = DROPPED

    def _for_effect(self, expression: ast.expr) -> None:
        """A call of a tensor's or a list's own method changes it; where that is unknown, so is the object."""
        try:
            self.evaluator.value(expression)
        except UnknownValueError:
            function = expression.func if isinstance(expression, ast.Call) else None
            if isinstance(function, ast.Attribute):
                for name in names_in(function.value):
                    if name in self.evaluator.assigned:
                        self.evaluator.assigned[name] = DROPPED

    def _loop(self, statement: ast.For | ast.While) -> None:
        evaluator = self.evaluator
        if isinstance(statement, ast.For):
            for item in items(evaluator.value(statement.iter)):
                evaluator.assign(statement.target, item)
                if self._round(statement.body):
                    return
        else:
            while truth(evaluator.value(statement.test)):
                if self._round(statement.body):
                    return
        self.run(statement.orelse)

    def _round(self, body: list[ast.stmt]) -> bool:
        try:
            self.run(body)
        except _LoopSignal as signal:
            return signal.ends
        return False

    def _with(self, statement: ast.With) -> None:
        with contextlib.ExitStack() as contexts:
            self.enter(statement, contexts)
            self.run(statement.body)

    def enter(self, statement: ast.With, contexts: contextlib.ExitStack) -> None:
        """Enter what ``with`` enters: autocast, and what changes no value.

        Raises:
            UnknownValueError: it enters something else.
        """
        for item in statement.items:
            call = item.context_expr
            name = call.func if isinstance(call, ast.Call) else call
            last = name.attr if isinstance(name, ast.Attribute) else name.id if isinstance(name, ast.Name) else ""
            if item.optional_vars is not None:
                raise UnknownValueError("with")
            if last == "autocast" and isinstance(call, ast.Call):
                contexts.enter_context(self.evaluator.autocast(call))
            elif last not in _CONTEXTS:
                raise UnknownValueError("with")


# --- source text -----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=32)
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError) as error:
        attach.let_through(error)
        return None


def function_of(file: str, code: types.CodeType) -> FunctionNode | None:
    """The definition that code object was compiled from; a script's own code is the whole file."""
    tree = _tree(file)
    if tree is None or code.co_name == "<module>":
        return tree
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == code.co_name:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    return None


def statements_in(body: FunctionNode) -> Iterator[ast.stmt]:
    """All statements of a function in the order of the text, without those of functions and classes inside it."""
    waiting: list[ast.AST] = list(reversed(body.body))
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if isinstance(node, ast.stmt):
            yield node
        waiting += [
            n for n in reversed(list(ast.iter_child_nodes(node))) if isinstance(n, (ast.stmt, ast.ExceptHandler))
        ]


def names_in(target: ast.expr) -> list[str]:
    """Names of variables in an expression."""
    return [n.id for n in ast.walk(target) if isinstance(n, ast.Name)]


def _loaded(target: ast.expr) -> ast.expr:
    match target:
        case ast.Name():
            return ast.Name(target.id, ast.Load())
        case ast.Subscript():
            return ast.copy_location(ast.Subscript(target.value, target.slice, ast.Load()), target)
        case ast.Attribute():
            return ast.copy_location(ast.Attribute(target.value, target.attr, ast.Load()), target)
    raise UnknownValueError("an attribute is written to")
