"""When casts to float8 are observed: from the first one on, in sampled steps, and only in code that makes them."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from precdoctor.recording.fp8.cast_observer import Observer, measure, outside
from precdoctor.recording.fp8.cast_scope import OUTSIDE, Call, Calls
from precdoctor.recording.fp8.fp8_mode import CastMode, is_open, open_observer, supported
from precdoctor.recording.fp8.provenance import Notes, is_float
from precdoctor.recording.ops.dispatched_ops import is_own_run, put_on, take_off
from precdoctor.recording.ops.source_lines import calls_in_progress
from precdoctor.recording.recorder import Recorder
from precdoctor.recording.recorder.hook_guard import guarded
from precdoctor.recording.slots.cast_operand import FLOAT8, Operand

if TYPE_CHECKING:
    from precdoctor.recording.observe.call_frame import Frame

#: Backward passes observed in vain; after that none is until one makes a cast.
_PATIENCE = 2


class Casts:
    """One per recorder; the modes it opens belong to the thread that runs the module or calls ``backward``.

    Attributes:
        met: a cast to float8 has been asked for in this process; until then nothing else here does anything.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._meet = guarded(recorder)(self._met)
        self._local = threading.local()
        recorder.when_forked.append(self._reset)
        recorder.when_closing.append(self._close_all)
        self._reset()

    def _reset(self) -> None:
        self.met = False
        #: Classes of modules whose own code casts.
        self._casting: set[type] = set()
        self._in_backward, self._vain = False, 0
        self._calls = Calls()
        self._results = Notes()
        self._names: dict[tuple[str, str, str, int, str], int] = {}
        self._when = (-1, -1)
        self._local = threading.local()

    def install(self) -> None:
        """Patch ``Tensor.to`` and ``Tensor.type``: they notice that a float8 dtype is asked for, and nothing else."""
        if not self._recorder.options.takes("fp8_operand"):
            return
        for name in ("to", "type"):
            setattr(Tensor, name, self._noticing(getattr(Tensor, name)))

    def _noticing(self, original: Any) -> Any:
        meet, dtype, narrow = self._meet, torch.dtype, frozenset(FLOAT8)

        @functools.wraps(original)
        def noticing(x: Tensor, /, *args: Any, **kwargs: Any) -> Any:
            for asked in args:  # called for every conversion of every tensor: types first, they cost least
                kind = asked.__class__
                if kind is dtype:
                    if asked in narrow and not torch.compiler.is_compiling():
                        meet(x, asked)
                elif kind is Tensor and asked.dtype in narrow and not torch.compiler.is_compiling():
                    meet(x, asked.dtype)
            if kwargs and kwargs.get("dtype") in narrow and not torch.compiler.is_compiling():
                meet(x, kwargs["dtype"])
            return original(x, *args, **kwargs)

        return noticing

    def _met(self, x: Tensor, dtype: torch.dtype) -> None:
        recorder = self._recorder
        if recorder.state != "armed" or not is_float(x):
            return
        first, self.met = not self.met, True
        frame = self._running()
        if first:
            self._note_running()
        if torch._C._current_graph_task_id() != -1:
            self._in_backward, self._vain = self._in_backward or frame is None, 0
            return
        if not recorder.live or is_open() or (frame is not None and not frame.recorded):
            return
        if frame is None:
            if is_own_run():  # else somebody replays, traces or counts
                self._outside(x, dtype, outside())
        elif not self._may_open():
            self._outside(x, dtype, _call_of(frame))
        elif type(frame.module) not in self._casting:
            self._casting.add(type(frame.module))
            self._in_backward, self._vain = True, 0  # what casts on its way forward may do so on its way back

    def observer_of_library(self) -> Observer | None:
        """Who is to be told of a call of a library's quantiser, now; null when nobody observes this code (yet)."""
        recorder = self._recorder
        if recorder.state != "armed":
            return None
        first, self.met = not self.met, True
        if (observer := open_observer()) is not None:
            return observer
        frame = self._running()
        if first:
            self._note_running()
        if torch._C._current_graph_task_id() != -1:
            self._in_backward, self._vain = True, 0
        elif frame is not None and frame.recorded:
            self._casting.add(type(frame.module))
            self._in_backward, self._vain = True, 0
        return None

    def _note_running(self) -> None:
        """The calls in progress at the first cast of all were begun unnoticed."""
        self._follow_step()
        running = self._running()
        for frame in getattr(self._recorder.local, "stack", ()):
            if frame.recorded:
                frame.call_made = dataclasses.replace(_call_of(frame), missed=frame is running)

    def _outside(self, x: Tensor, dtype: torch.dtype, call: Call) -> None:
        """A cast that no mode sees: nothing is known of how the tensor was made."""
        self._follow_step()
        measure(self._recorder, call, self._named(call, "cast"), x, Operand(FLOAT8[dtype], None, whole=False))

    def _running(self) -> Frame | None:
        """The innermost module call of this thread."""
        stack: list[Frame] = getattr(self._recorder.local, "stack", None) or []
        return stack[-1] if stack else None

    def _may_open(self) -> bool:
        if self._recorder.traced:
            return False
        return is_own_run(CastMode) and torch._C._functorch.maybe_current_level() is None and supported()

    def looks_at(self, module: nn.Module) -> bool:
        """Whether calls of this module are observed, as far as the module decides it."""
        return type(module) in self._casting

    def holds(self, owner: nn.Module) -> None:
        """A module has a float8 buffer: casts that ``copy_`` makes into it are noticed by nothing else."""
        self.met = True
        self._casting.add(type(owner))

    # --- module calls ------------------------------------------------------------------------------------------------

    @property
    def _open(self) -> list[tuple[object, CastMode | None]]:
        """Of this thread: the calls inside the outermost one that is observed, each with its mode if it has one."""
        if not hasattr(self._local, "open"):
            self._local.open = []
        found: list[tuple[object, CastMode | None]] = self._local.open
        return found

    def entered(self, frame: Frame, given: Mapping[Any, Any], *, recompute: bool) -> None:
        """A module call begins; the mode of a call above it does not see inside."""
        self._follow_step()
        self._let_go_of_interrupted()
        frame.call_made = call = _call_of(frame) if frame.recorded and not recompute else None
        if self._open or (call is not None and self.looks_at(frame.module) and self._may_open()):
            self._push(frame.module, self._observing(frame.module, call, given))

    def _observing(self, module: nn.Module, call: Call | None, given: Mapping[Any, Any]) -> CastMode | None:
        if call is None or not self.looks_at(module) or not self._may_open():
            return None
        call.note_names(module, given)
        return CastMode(Observer(self._recorder, lambda _: call, self._named, self._results))

    def left(self, module: nn.Module) -> None:
        """A module call has ended, however it did; asks for nothing but that, for recording may be off by now."""
        if any(owner is module for owner, _ in self._open):
            while self._pop() is not module:
                pass

    def ended(self, frame: Frame) -> None:
        """The same, of a call that was recorded."""
        if frame.call_made is not None:
            self._calls.ended(frame.call_made)

    def _let_go_of_interrupted(self) -> None:
        """A keyboard interrupt leaves a call without telling anybody."""
        while self._open and isinstance(self._open[-1][0], nn.Module) and not calls_in_progress(self._open[-1][0]):
            self._pop()

    def _close_all(self) -> None:
        """Nothing is recorded any more; an interrupted call may have left something open."""
        while self._open:
            self._pop()

    def _push(self, owner: object, mode: CastMode | None) -> None:
        above = self._open[-1][1] if self._open else None
        if above is not None and above.is_top:
            take_off(above)
        self._open.append((owner, mode))
        _put_on(mode)

    def _pop(self) -> object:
        owner, mode = self._open.pop()
        if mode is not None:
            take_off(mode)
            mode.observer.close()
        if self._open:
            _put_on(self._open[-1][1])
        return owner

    # --- backward passes ---------------------------------------------------------------------------------------------

    def backward_begins(self) -> object | None:
        """To be given to :meth:`backward_ended`; None when this pass is not observed."""
        if not (self._in_backward and self._recorder.live and self._may_open()):
            return None
        self._follow_step()
        self._let_go_of_interrupted()
        owner = object()
        thread, depth = threading.get_ident(), len(getattr(self._recorder.local, "stack", ()))
        find = functools.partial(self._call_of_node, thread, depth)
        self._push(owner, CastMode(Observer(self._recorder, find, self._named, self._results)))
        return owner

    def backward_ended(self, owner: object) -> None:
        """However it did."""
        mode = next((mode for known, mode in self._open if known is owner), None)
        while self._pop() is not owner:
            pass
        if mode is not None:
            self._vain = 0 if mode.observer.casts else self._vain + 1
            self._in_backward = self._vain < _PATIENCE

    def _call_of_node(self, thread: int, depth: int, number: int | None) -> Call | None:
        """The call whose backward runs; None in modules that are called again by it: their casts have rows."""
        running = len(getattr(self._recorder.local, "stack", ()))
        if running > (depth if threading.get_ident() == thread else 0):
            return None
        found = self._calls.of_node(number) if number is not None else None
        if found is not None and found.missed:
            return None
        return dataclasses.replace(found or Call(OUTSIDE), phase="train", backward=True)

    # --- names -------------------------------------------------------------------------------------------------------

    def _named(self, call: Call, name: str) -> str:
        """``cast`` gets a number always, other names from the second time on."""
        mode = "eval" if call.evaluating else call.phase
        key = (call.place.root, call.place.module, mode, call.number, name)
        count = self._names[key] = self._names.get(key, -1) + 1
        return f"{name}.{count}" if count or name == "cast" else name

    def _follow_step(self) -> None:
        recorder = self._recorder
        now = (recorder.step, recorder.micro_step)
        if now != self._when:
            if now[0] != self._when[0]:
                self._calls.clear()
                self._results.clear()
            self._names.clear()
            self._when = now


def _call_of(frame: Frame) -> Call:
    assert frame.place is not None, "it is recorded"
    return Call(frame.place, frame.call, frame.mode.phase, evaluating=frame.mode.evaluating, first=frame.first_node)


def _put_on(mode: CastMode | None) -> None:
    """Open a mode, unless there is one of somebody else's: those may end in another order than they began."""
    if mode is not None and not is_open() and is_own_run(CastMode):
        put_on(mode)
