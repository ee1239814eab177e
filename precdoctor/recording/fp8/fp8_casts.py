"""Decides when casts to float8 are observed: after the first one, in sampled steps, only in code that makes them."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from precdoctor.recording.fp8.cast_observer import Observer, measure
from precdoctor.recording.fp8.cast_scope import OUTSIDE, Call, Calls
from precdoctor.recording.fp8.fp8_mode import CastMode, is_open, open_observer, supported
from precdoctor.recording.fp8.provenance import is_float
from precdoctor.recording.ops.dispatched_ops import is_own_run, put_on, take_off
from precdoctor.recording.ops.source_lines import calls_in_progress
from precdoctor.recording.ops.storage_notes import Notes
from precdoctor.recording.recorder import Recorder
from precdoctor.recording.recorder.hook_guard import guarded
from precdoctor.recording.slots.cast_operand import FLOAT8, Operand
from precdoctor.recording.slots.deferred import is_capturing
from precdoctor.recording.slots.slot_table import Entry

if TYPE_CHECKING:
    from precdoctor.recording.observe.call_frame import Frame

#: After this many observed backward passes without a cast, none is observed until a cast in one, or in a new module.
_PATIENCE = 2


class Casts:
    """Opens the modes of one recorder, on the threads that run modules or call ``backward``.

    Attributes:
        met: whether this process has requested a cast to float8; until then no mode is opened.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._local = threading.local()
        recorder.when_forked.append(self._reset)
        recorder.when_closing.append(self._close_all)
        self._reset()

    def _reset(self) -> None:
        self.met = False
        #: Classes of modules whose own code casts.
        self._casting: set[type] = set()
        self._observes_backward, self._passes_in_vain = False, 0
        self._calls = Calls()
        self._results: Notes[Entry] = Notes()
        self._names: dict[tuple[str, str, str, int, str], int] = {}
        self._noted_step = (-1, -1)
        self._local = threading.local()

    def install(self) -> None:
        """Patch ``Tensor.to`` and ``Tensor.type`` so that they notice a request for a float8 dtype."""
        if not self._recorder.options.takes("fp8_operand"):
            return
        for name in ("to", "type"):
            setattr(Tensor, name, self._with_notice(getattr(Tensor, name)))

    def _with_notice(self, original: Any) -> Any:
        """Return a wrapper of ``Tensor.to`` or ``Tensor.type`` that reports requests for a float8 dtype."""
        note, dtype, narrow = guarded(self._recorder)(self._note_request), torch.dtype, frozenset(FLOAT8)

        @functools.wraps(original)
        def noticing(x: Tensor, /, *args: Any, **kwargs: Any) -> Any:
            for asked in args:  # cheapest check first: this runs for every conversion of every tensor
                kind = asked.__class__
                if kind is dtype:
                    if asked in narrow and not torch.compiler.is_compiling():
                        note(x, asked)
                elif kind is Tensor and asked.dtype in narrow and not torch.compiler.is_compiling():
                    note(x, asked.dtype)
            if kwargs and kwargs.get("dtype") in narrow and not torch.compiler.is_compiling():
                note(x, kwargs["dtype"])
            return original(x, *args, **kwargs)

        return noticing

    def _note_request(self, x: Tensor, dtype: torch.dtype) -> None:
        """Note a request for a float8 dtype; record the cast if no mode observes it."""
        recorder = self._recorder
        if recorder.state != "armed" or not is_float(x):
            return
        frame = self._meet()
        if torch._C._current_graph_task_id() != -1:
            self._observes_backward, self._passes_in_vain = self._observes_backward or frame is None, 0
            return
        if not recorder.live or is_open() or (frame is not None and not frame.recorded):
            return
        if frame is None:
            if is_own_run():  # otherwise a replay, a trace or an op counter runs the code
                phase = "train" if torch.is_grad_enabled() else "no_grad"  # then they do not count as training
                self._record_unobserved(x, dtype, Call(OUTSIDE, phase=phase))
        elif not self._may_open():
            self._record_unobserved(x, dtype, _call_of(frame))
        elif type(frame.module) not in self._casting:
            self._casting.add(type(frame.module))
            self._observes_backward, self._passes_in_vain = True, 0  # its backward may cast also

    def observer_of_library(self) -> Observer | None:
        """Return the observer for a call of a library's quantiser; None if this code is not observed (yet)."""
        recorder = self._recorder
        if recorder.state != "armed":
            return None
        if (observer := open_observer()) is not None:
            self.met = True
            return observer
        frame = self._meet()
        if torch._C._current_graph_task_id() != -1:
            self._observes_backward, self._passes_in_vain = True, 0
        elif frame is not None and frame.recorded:
            self._casting.add(type(frame.module))
            self._observes_backward, self._passes_in_vain = True, 0
        return None

    def _meet(self) -> Frame | None:
        """Note that there are casts; return the innermost module call in progress.

        At the first cast create the :class:`Call` of those in progress: none was observed from its start.
        """
        running = self._innermost_frame()
        if not self.met:
            self.met = True
            self._follow_step()
            for frame in getattr(self._recorder.local, "stack", ()):
                if frame.recorded:
                    frame.call_made = dataclasses.replace(_call_of(frame), missed=frame is running)
        return running

    def _record_unobserved(self, x: Tensor, dtype: torch.dtype, call: Call) -> None:
        """Record a cast that no mode observes: the history of the tensor is unknown."""
        self._follow_step()
        measure(self._recorder, call, self._named(call, "cast"), x, Operand(FLOAT8[dtype], None, whole=False))

    def _innermost_frame(self) -> Frame | None:
        stack: list[Frame] = getattr(self._recorder.local, "stack", None) or []
        return stack[-1] if stack else None

    def _may_open(self) -> bool:
        """Whether the mode can be open here: no other mode or functorch transform, no trace of the step, no capture.

        While a CUDA graph is captured no scale can be read, and a replay would compute another one.
        """
        if self._recorder.traced or is_capturing():
            return False
        return is_own_run(CastMode) and torch._C._functorch.maybe_current_level() is None and supported()

    def looks_at(self, module: nn.Module) -> bool:
        """Whether calls of this module are observed, if nothing else prevents it."""
        return type(module) in self._casting

    def holds(self, owner: nn.Module) -> None:
        """Note that a module has a float8 buffer: nothing else notices the casts that ``copy_`` makes into it."""
        self.met = True
        self._casting.add(type(owner))

    # --- module calls ------------------------------------------------------------------------------------------------

    @property
    def _open(self) -> list[tuple[object, CastMode | None]]:
        """Calls of this thread inside the outermost observed one, each with its mode if it has one."""
        if not hasattr(self._local, "open"):
            self._local.open = []
        return self._local.open

    def entered(self, frame: Frame, given: Mapping[Any, Any], *, recompute: bool) -> None:
        """Begin a module call: close the mode of the outer call, and open one for this call if it is observed."""
        self._follow_step()
        self._let_go_of_interrupted()
        frame.call_made = call = _call_of(frame) if frame.recorded and not recompute else None
        if self._open or (call is not None and self.looks_at(frame.module) and self._may_open()):
            self._push(frame.module, self._observing(frame.module, call, given))

    def _observing(self, module: nn.Module, call: Call | None, given: Mapping[Any, Any]) -> CastMode | None:
        """Return a new mode for a module call; None if the call is not observed."""
        if call is None or not self.looks_at(module) or not self._may_open():
            return None
        call.note_names(module, given)
        return CastMode(Observer(self._recorder, lambda _: call, self._named, self._results))

    def left(self, module: nn.Module) -> None:
        """End a module call, also after an exception. Works after recording was turned off."""
        if any(owner is module for owner, _ in self._open):
            while self._pop() is not module:
                pass

    def ended(self, frame: Frame) -> None:
        """Note the end of a recorded call, for casts in its backward."""
        if frame.call_made is not None:
            self._calls.ended(frame.call_made)

    def _let_go_of_interrupted(self) -> None:
        """Close the modes of calls that an interrupt ended without a notification."""
        while self._open and isinstance(self._open[-1][0], nn.Module) and not calls_in_progress(self._open[-1][0]):
            self._pop()

    def _close_all(self) -> None:
        """Close every mode: an interrupted call may have left some open."""
        while self._open:
            self._pop()

    def _push(self, owner: object, mode: CastMode | None) -> None:
        """Note a module call or backward pass, and replace the mode of the outer one by its mode."""
        above = self._open[-1][1] if self._open else None
        if above is not None and above.is_top:
            take_off(above)
        self._open.append((owner, mode))
        _open_mode(mode)

    def _pop(self) -> object:
        """Close the mode of the innermost call or pass, and reopen that of the next outer one; return the owner."""
        owner, mode = self._open.pop()
        if mode is not None:
            take_off(mode)
            mode.observer.close()
        if self._open:
            _open_mode(self._open[-1][1])
        return owner

    # --- backward passes ---------------------------------------------------------------------------------------------

    def backward_begins(self) -> object | None:
        """Begin to observe a backward pass. Return a token for :meth:`backward_ended`; None if it is not observed."""
        if not (self._observes_backward and self._recorder.live and self._may_open()):
            return None
        self._follow_step()
        self._let_go_of_interrupted()
        owner = object()
        thread, depth = threading.get_ident(), len(getattr(self._recorder.local, "stack", ()))
        find = functools.partial(self._call_of_node, thread, depth)
        self._push(owner, CastMode(Observer(self._recorder, find, self._named, self._results)))
        return owner

    def backward_ended(self, owner: object) -> None:
        """End the observation of a backward pass, also after an exception."""
        mode = next((mode for known, mode in self._open if known is owner), None)
        while self._pop() is not owner:
            pass
        if mode is not None:
            self._passes_in_vain = 0 if mode.observer.casts else self._passes_in_vain + 1
            self._observes_backward = self._passes_in_vain < _PATIENCE

    def _call_of_node(self, thread: int, depth: int, number: int | None) -> Call | None:
        """Return the call whose backward runs.

        None in a module that the backward pass reruns, because its casts have rows already; or if they were missed.
        """
        running = len(getattr(self._recorder.local, "stack", ()))
        if running > (depth if threading.get_ident() == thread else 0):
            return None
        found = self._calls.of_node(number) if number is not None else None
        if found is not None and found.missed:
            return None
        return dataclasses.replace(found or Call(OUTSIDE), phase="train", backward=True)

    # --- names -------------------------------------------------------------------------------------------------------

    def _named(self, call: Call, name: str) -> str:
        """Return the name with a number: ``cast`` always has one, other names from the second time on."""
        mode = "eval" if call.evaluating else call.phase
        key = (call.place.root, call.place.module, mode, call.number, name)
        count = self._names[key] = self._names.get(key, -1) + 1
        return f"{name}.{count}" if count or name == "cast" else name

    def _follow_step(self) -> None:
        """Drop the calls and results of earlier steps, and the names of earlier micro-steps."""
        recorder = self._recorder
        now = (recorder.step, recorder.micro_step)
        if now != self._noted_step:
            if now[0] != self._noted_step[0]:
                self._calls.clear()
                self._results.clear()
            self._names.clear()
            self._noted_step = now


def _call_of(frame: Frame) -> Call:
    assert frame.place is not None, "it is recorded"
    return Call(frame.place, frame.call, frame.mode.phase, evaluating=frame.mode.evaluating, first=frame.first_node)


def _open_mode(mode: CastMode | None) -> None:
    """Open a mode, unless a foreign mode is open: foreign modes may end in another order than they began."""
    if mode is not None and not is_open() and is_own_run(CastMode):
        put_on(mode)
