"""The variables of the user's functions while loss code runs: what a later look at its source text begins with.

Tensors made without a gradient leave nothing in autograd's graph. Their variables are noted by reference, for one step;
tensors within a share of ``--scene-memory``, other objects weakly. Nothing is computed, and copied are only variables
that the first steps have shown to be written to before ``backward`` (a buffer that a loader fills again).
"""

from __future__ import annotations

import inspect
import sys
import types
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from precdoctor.recording import kernels
from precdoctor.recording.model import tensor_leaves
from precdoctor.recording.ops.source_lines import FOREIGN
from precdoctor.recording.process import attach

#: Rounds of a loop whose lines are noted (and after them those numbered by powers of two), and notes of further rounds.
_MAX_ROUNDS, _MAX_AGAIN = 4, 32
#: Functions noted outwards from the one that runs, and elements of a list.
_MAX_DEPTH, _MAX_ELEMENTS = 4, 32
_MAX_NEST = 2
#: The same for a look that is over before the next statement runs.
_WHOLE_DEPTH, _WHOLE_ELEMENTS, _WHOLE_NEST = 8, 1024, 4
_PLAIN = frozenset(
    (
        *(int, float, complex, bool, str, type(None), slice, torch.dtype, torch.device, torch.Size, type),
        *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.MethodDescriptorType),
    )
)
#: Keys that nobody's code hashes or compares.
_KEYS = frozenset((str, int, bool, float, type(None)))
#: Up to Python 3.12 a frame has one dictionary of its variables, which ``locals()`` gives away.
_SHARED = sys.version_info < (3, 13)
#: References to it where nobody else asked for it: the frame's, a variable's, and the one that asks how many.
_OURS = 3


#: Backward passes before which it is looked whether noted tensors have been written to; bytes of one that is copied
#: because of that, and how many variables there may be.
_LOOKS, _MAX_COPY, _MAX_WRITTEN = 8, 1 << 22, 16

#: What gives a function's variables away to itself.
_TAKES = frozenset(("locals", "vars", "exec", "eval"))
_EXACT = frozenset(tensor_leaves.EXACT)
_is_transformed = torch._C._functorch.is_functorch_wrapped_tensor
#: The variables of a frame by ``id``.
_Stamp = tuple[int, ...]


class _Dropped:
    """Stands for a value that was not kept."""


DROPPED = _Dropped()


@dataclass(slots=True, eq=False)  # not frozen: a frozen one takes three times as long to make
class Held:
    """A tensor and its version counter when it was noted."""

    value: Tensor
    version: int


@dataclass(slots=True, eq=False)
class Variables:
    """One running function: its code, the line it was at, its variables, and who called it.

    Attributes:
        values: tensors as :class:`Held`, other objects as weak references; of a module its own dictionary.
    """

    code: types.CodeType
    line: int
    values: Mapping[str, Any]
    globals: Mapping[str, Any]
    caller: Variables | None


class Notebook:
    """Notes the variables of the functions that run, by reference.

    Args:
        affords: whether there is room to keep a tensor.
        whole: nothing is kept for long, so everything may be: tensors with their graphs, objects themselves.
    """

    def __init__(self, affords: Callable[[Tensor], bool], *, whole: bool = False) -> None:
        self._affords = affords
        self._whole = whole
        self._max_elements = _WHOLE_ELEMENTS if whole else _MAX_ELEMENTS
        self._max_nest = _WHOLE_NEST if whole else _MAX_NEST
        #: Variables whose tensors get written to after they were noted, and what tells.
        self._written: set[tuple[types.CodeType, str]] = set()
        self._watched: list[tuple[tuple[types.CodeType, str], weakref.ref[Tensor], int]] = []
        self._looks = 0 if whole else _LOOKS
        self._variable: tuple[types.CodeType, str] | None = None
        self.clear()

    def clear(self) -> None:
        """Let go of everything."""
        #: Per frame what its variables were by ``id``, which tell whether it is the same frame still, and its note.
        self._latest: dict[int, tuple[_Stamp, Variables]] = {}
        #: How often a line was met: loops would be noted without end.
        self._rounds: dict[tuple[int, int | None], int] = {}
        self._again = 0
        self._watched.clear()

    def learn(self) -> None:
        """Called before ``backward``: which of the tensors noted since have been written to?"""
        self._looks = max(self._looks - 1, 0)
        if not self._watched:
            return
        seen = ((variable, ref(), version) for variable, ref, version in self._watched)
        changed = {variable for variable, x, version in seen if x is not None and tensor_leaves.version(x) != version}
        self._written |= set(list(changed)[: _MAX_WRITTEN - len(self._written)])
        self._watched.clear()

    def note(self) -> Variables | None:
        """The functions of the user's that are running, innermost first; null when the line has been noted enough."""
        frames = _user_frames(_WHOLE_DEPTH if self._whole else _MAX_DEPTH)
        if not frames or not self._is_due(frames[0]) or sys.gettrace() is not None:
            return None  # a debugger writes variables back from the dictionary that would be read here
        with torch._C.DisableTorchFunction():  # subclasses and modes of the user's may watch every attribute
            return self._of(frames)

    def _is_due(self, frame: types.FrameType) -> bool:
        place = id(frame.f_code), frame.f_lineno
        rounds = self._rounds[place] = self._rounds.get(place, 0) + 1
        if rounds > 1 and (self._again == _MAX_AGAIN or (rounds > _MAX_ROUNDS and rounds & (rounds - 1))):
            return False
        self._again += rounds > 1
        return True

    def _of(self, frames: list[types.FrameType]) -> Variables | None:
        found: Variables | None = None
        for frame in reversed(frames):
            code, line = frame.f_code, frame.f_lineno or 0  # there are instructions without a line
            before, known = self._latest.get(id(frame), ((), None))
            same = known is not None and known.caller is found and known.code is code and known.line == line
            asked = before if same and frame is not frames[0] else None
            now, values = self._values(frame, asked)
            if known is None or values is not None:
                known = Variables(code, line, values or {}, frame.f_globals, found)
                self._latest[id(frame)] = now, known
            found = known
        return found

    def _values(self, frame: types.FrameType, before: _Stamp | None) -> tuple[_Stamp, Mapping[str, Any] | None]:
        """Which objects the variables are (a new frame may lie where one of the same function has been), and what is
        kept of them; null if they are the same as ``before``.
        """
        code = frame.f_code
        if code.co_name == "<module>":
            stamp: _Stamp = (id(frame.f_globals),)
            if stamp == before:
                return stamp, None
            own = frame.f_locals
            apart = type(own) is dict and "__builtins__" not in own  # ``exec`` with a dictionary for locals
            return stamp, self._all(own, code) if apart else self._of_script(frame)
        if not code.co_flags & inspect.CO_OPTIMIZED or (_SHARED and not _TAKES.isdisjoint(code.co_names)):
            # A class body: what is asked for would be its real variables. Else: a trace of asking would be left.
            return (), None if before == () else {}
        own = frame.f_locals
        stamp = tuple(map(id, own.values()))
        found = None if stamp == before else self._all(own, code)
        if _SHARED and sys.getrefcount(own) <= _OURS:
            own.clear()  # it would keep the variables alive
        return stamp, found

    def _of_script(self, frame: types.FrameType) -> Mapping[str, Any]:
        """Variables of a script as they will be, but for those that are known to be written to."""
        code, own = frame.f_code, frame.f_globals
        for name, value in own.items() if self._looks else ():
            if type(value) is Tensor and not value.requires_grad:
                self._watch((code, name), value)
        if not self._written:
            return own
        written = {n: own[n] for c, n in self._written if c is code and issubclass(type(own.get(n)), Tensor)}
        copies = self._all(written, code)
        return ChainMap(copies, own) if copies else own

    def _all(self, values: Mapping[str, Any], code: types.CodeType) -> dict[str, Any]:
        kept = {}
        for name, value in values.items():
            kind = type(value)
            if kind not in _PLAIN:
                self._variable = (code, name)
                note = self._held(value) if kind in _EXACT else self._keep(value)
                if note is not DROPPED:
                    kept[name] = note
            else:
                kept[name] = value
        return kept

    def _keep(self, value: Any, depth: int = 0) -> Any:
        """By its type alone: an object's attributes, its ``__class__`` and its ``__eq__`` may be code of the user's."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if issubclass(kind, Tensor):
            return self._held(value)
        if kind is list or kind is tuple or kind is dict:
            if depth == self._max_nest or len(value) > self._max_elements:
                return DROPPED
            if kind is dict:
                plain = all(type(k) in _KEYS for k in value)
                return {k: self._keep(v, depth=depth + 1) for k, v in value.items()} if plain else DROPPED
            return kind(self._keep(v, depth=depth + 1) for v in value)
        try:
            return value if self._whole else weakref.ref(value)
        except TypeError:
            return DROPPED

    def _watch(self, variable: tuple[types.CodeType, str], x: Tensor) -> None:
        self._watched.append((variable, weakref.ref(x), tensor_leaves.version(x)))

    def _held(self, x: Tensor) -> Any:
        try:
            exact = type(x) in _EXACT
            if _is_transformed(x) or not (exact or not tensor_leaves.is_wrapped(x)) or x.layout is not torch.strided:
                return DROPPED  # its values are elsewhere
            if not self._whole and (x.requires_grad or x._base is not None) and tensor_leaves.has_graph(x):
                return DROPPED  # it would be kept with it
            if self._looks and self._variable is not None:
                self._watch(self._variable, x)
            written = self._written and self._variable in self._written  # a code object's hash takes its time
            if written and x.nbytes <= _MAX_COPY and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
                x = _copy(x)
            return Held(x, tensor_leaves.version(x)) if self._affords(x) else DROPPED
        except (RuntimeError, NotImplementedError) as error:  # a kind of tensor without memory
            attach.let_through(error)
            return DROPPED


def _copy(x: Tensor) -> Tensor:
    with kernels.apart_from_user_modes():
        return x.detach().clone()


def _user_frames(depth: int) -> list[types.FrameType]:
    """Frames of the user's code from the innermost outwards; those of torch and ours are passed over."""
    frame: types.FrameType | None = sys._getframe(1)
    found: list[types.FrameType] = []
    while frame is not None and len(found) < depth:
        code = frame.f_code
        if not code.co_filename.startswith(FOREIGN):
            found.append(frame)
            if code.co_name == "<module>":
                break
        frame = frame.f_back
    return found


def name_of(x: Tensor, at: Variables) -> str | None:
    """What a function calls a tensor: a variable of its own or of its module, or ``layers.0.weight`` of one."""
    for scope in (at.values, at.globals):
        for name, value in list(scope.items()):
            if (path := _path_to(x, value, 0)) is not None:
                return ".".join((name, *path))
    return None


def _path_to(x: Tensor, value: Any, depth: int) -> tuple[str, ...] | None:
    value = value.value if type(value) is Held else value() if type(value) is weakref.ref else value
    if value is x:
        return ()
    kind = type(value)
    if kind in _PLAIN or issubclass(kind, Tensor) or depth == _WHOLE_NEST:
        return None
    items: Iterator[tuple[Any, Any]] | list[tuple[Any, Any]]
    if kind is list or kind is tuple:
        items = enumerate(value)
    else:
        try:
            items = list((value if kind is dict else object.__getattribute__(value, "__dict__")).items())
        except (AttributeError, TypeError):
            return None
    for key, item in items if len(value) <= _WHOLE_ELEMENTS or kind not in (list, tuple, dict) else ():
        if (path := _path_to(x, item, depth + 1)) is not None:
            return (str(key), *path) if type(key) in _KEYS else path
    return None
