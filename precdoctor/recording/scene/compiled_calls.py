"""Keeps calls of compiled functions, so that a replay can run them again uncompiled.

Module hooks do not run inside a compiled graph, and autograd sees a compiled loss function as one node. So a call of a
compiled function is kept like a root call: by reference, until the step ends, and only if no module is running. A
module compiled in place (``model.compile()``) is called past the global hooks, so its hooks are run from here.

No function is wrapped: Dynamo's compile context calls our hooks whenever it is entered and left.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from precdoctor.recording.model import static
from precdoctor.recording.ops.dispatched_ops import is_own_run
from precdoctor.recording.recorder.hook_guard import guarded
from precdoctor.recording.recorder.step_context import StepContext
from precdoctor.recording.scene.compiled_function import CompiledFunction, reads_of, runs_again, trains
from precdoctor.recording.scene.loss_code import LossCode
from precdoctor.recording.scene.root_call import RootCall
from precdoctor.recording.scene.step_snapshot import Scene

#: Name of the Dynamo function that enters the context and calls the compiled function: in current torch, in torch 2.6.
_WRAPPERS = frozenset(("compile_wrapper", "_fn"))
#: Once a step has this many top-level calls, calls of functions are not kept any more: modules must find room.
_MAX_CALLS = 32
#: The method that a module compiled in place calls.
_IN_PLACE = "_call_impl"
#: Methods that a compiled module (``torch.compile(model)``) calls; hooks of the module run by themselves.
_BY_HOOKS = frozenset(("_wrapped_call_impl", "__call__", "forward"))


class CompiledCalls:
    """Receives call notifications from Dynamo (see the module docstring).

    Args:
        before: called with a module compiled in place and its arguments, before it runs; ``after`` also gets its
            result.
        forward_begins: called as a compiled train step begins.
        instrumented: whether compiled graphs report their modules themselves.
        region: called with a compiled function or module and its arguments; the callback it returns gets the result.
    """

    def __init__(
        self,
        context: StepContext,
        scene: Scene,
        loss_code: LossCode,
        before: Callable[[nn.Module, Any], None],
        after: Callable[[nn.Module, Any, Any], None],
        forward_begins: Callable[[], None],
        region: Callable[[Any, Any], Callable[[Any], None] | None],
        *,
        instrumented: bool,
    ) -> None:
        self._context = context
        self._scene = scene
        self._loss_code = loss_code
        self._before, self._after = before, after
        self._forward_begins, self._instrumented = forward_begins, instrumented
        self._region = region
        self._stand_ins: weakref.WeakKeyDictionary[types.FunctionType, CompiledFunction | None] = (
            weakref.WeakKeyDictionary()
        )
        self._enter = guarded(context)(self._begin_call)
        self._end = guarded(context)(self._end_call)

    def install(self, compiles: Callable[[], None]) -> None:
        """Patch ``torch.compile``; the first call of it installs our hooks, because Dynamo need not be loaded before.

        Args:
            compiles: called at each ``torch.compile``, before anything is compiled.
        """
        original = torch.compile
        listen = functools.cache(guarded(self._context)(self._listen))

        @functools.wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:  # noqa: A001 - as torch has it
            compiles()
            listen()
            return original(*args, **kwargs)

        torch.compile = compile  # __wrapped__ is kept

    def _listen(self) -> None:
        """Add our hook to every compile context of Dynamo."""
        from torch._dynamo import eval_frame

        self._scene.when_cleared.append(self._release)
        context: Any = eval_frame.OptimizeContext
        original, entered = context.__call__, self._handle_call

        @functools.wraps(original)
        def call(self: Any, function: Any) -> Any:
            hooks = getattr(self, "enter_exit_hooks", None)
            if type(hooks) is list and not _has_hooks(function) and entered not in hooks:
                hooks.append(entered)
            return original(self, function)

        context.__call__ = call
        self._keep_backward_apart()

    @staticmethod
    def _keep_backward_apart() -> None:
        """Disable Dynamo for our ``backward``: compiled within a train step, the patch would do nothing."""
        from torch import _dynamo

        ours = torch.autograd.backward
        apart: Any = _dynamo.disable(ours)
        apart.__wrapped__ = getattr(ours, "__wrapped__", ours)
        torch.autograd.backward = apart

    # --- calls -------------------------------------------------------------------------------------------------------

    def _handle_call(self) -> Callable[[], None]:
        """Handle a compiled function that is about to be called; return a callback for its end."""
        return self._enter() or (lambda: None)

    def _begin_call(self) -> Callable[[], None] | None:
        """Handle a call of compiled code; return a callback for its end, None if there is nothing to do then."""
        if not self._is_own_call():
            return None
        frame = _wrapper()
        own: Mapping[str, Any] = frame.f_locals if frame is not None else {}
        function, args, kwargs = own.get("fn"), own.get("args"), own.get("kwargs")
        if type(args) is not tuple or type(kwargs) is not dict:
            return None
        owner, name = _method(function)
        in_place = issubclass(type(owner), nn.Module) and name == _IN_PLACE
        leave = self._on_module(owner, args) if in_place else self._on_function(function, args, kwargs)
        ended = self._region(owner if in_place else function, (args, kwargs))  # last: module hooks open the window
        if ended is None:
            return leave

        def both() -> None:
            ended(_result())
            if leave is not None:
                leave()

        return both

    def _on_function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], None] | None:
        """Keep a call of a compiled function; return a callback for its end, None if it is not kept."""
        inside = getattr(self._context.local, "stack", None)  # in a module, whose replay will call the function again
        if inside or not (self._scene.enabled and torch.is_grad_enabled()):
            return None
        was_open = self._loss_code.running
        call = self._keep_call(function, args, kwargs)
        if call is None:
            return None
        self._loss_code.close()
        return functools.partial(self._end, call, was_open=was_open)

    def _is_own_call(self) -> bool:
        """Return whether the user's own forward code makes this call, and it runs compiled."""
        return (
            self._context.state in ("armed", "idle")
            and not torch.compiler.is_compiling()
            and torch._C._current_graph_task_id() == -1
            and torch._C._functorch.maybe_current_level() is None
            and is_own_run()
            and _compiles()
        )

    def _on_module(self, module: nn.Module, args: tuple[Any, ...]) -> Callable[[], None] | None:
        """Run the hooks before a module compiled in place, if not ``instrumented``; return what runs those after it."""
        if self._instrumented:
            return None
        self._before(module, args)

        def leave() -> None:
            self._after(module, args, _result())

        return leave

    def _keep_call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RootCall | None:
        """Keep a call of a function if it may run again and leaves room for modules; return None if it is not kept."""
        scene, context = self._scene, self._context
        if (stand_in := self._stand_in_of(function)) is None:
            return None
        if stand_in.trains and context.state == "armed":
            self._forward_begins()
        scene.begin_step_if_new()
        if scene.refused is not None or len(scene.calls) >= _MAX_CALLS or not scene.has_room((args, kwargs)):
            return None
        reads = reads_of(function)
        stand_in.take(function, {**reads, **{str(i): x for i, x in enumerate(args)}, **kwargs})
        trained = [m for m in stand_in.children() if next(static.parameters(m), None) is not None]
        if context.state != "armed" and not (trained and context.arm()):
            return None
        places = [context.names.place(m, None) for m in trained]
        call = scene.enter(stand_in, places[0].root if places else "", args, kwargs)
        if call is not None:
            call.parametric = bool(trained)
            call.owners = stand_in.owners(reads)
        return call

    def _end_call(self, call: RootCall, *, was_open: bool) -> None:
        """Keep the result of a call, and resume noting loss code if it returned or noting was on before."""
        result = _result()
        if result is not None and any(call is c for c in self._scene.calls):
            self._scene.leave(call, result)
        if (result is not None or was_open) and self._loss_code.supported:
            self._loss_code.open()

    # --- functions ---------------------------------------------------------------------------------------------------

    def _stand_in_of(self, function: Any) -> CompiledFunction | None:
        """Return the stand-in of a function, always the same one; None if it must not be run again."""
        plain = function.__func__ if type(function) is types.MethodType else function
        if type(plain) is not types.FunctionType:
            return None
        if plain not in self._stand_ins:
            again = runs_again(plain)
            self._stand_ins[plain] = CompiledFunction(trains=not again) if again or trains(plain) else None
        return self._stand_ins[plain]

    def _release(self) -> None:
        """Release the user's modules and functions: the step is over."""
        for stand_in in self._stand_ins.values():
            if stand_in is not None:
                stand_in.release()


def _has_hooks(function: Any) -> bool:
    """Return whether a function is a module or a method by which a compiled module is called: its hooks run anyway.

    Dynamo's context of a module may also be pickled with it, and must not hold our hook.
    """
    owner, name = _method(function)
    return issubclass(type(function), nn.Module) or (issubclass(type(owner), nn.Module) and name in _BY_HOOKS)


def _method(function: Any) -> tuple[Any, str]:
    """Return the object that a method is bound to and the method's name; None and "" for anything else."""
    return (function.__self__, function.__func__.__name__) if type(function) is types.MethodType else (None, "")


def _compiles() -> bool:
    """Return whether compiled functions run compiled; under ``set_stance("force_eager")`` module hooks run anyway."""
    stance = getattr(sys.modules["torch._dynamo.eval_frame"], "_stance", None)
    return str(getattr(stance, "stance", "default")) in ("default", "fail_on_recompile", "eager_then_compile")


def _wrapper() -> types.FrameType | None:
    """Return the frame of the Dynamo function that is calling us; None if not found."""
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(6):
        if frame is None or frame.f_code.co_name in _WRAPPERS:
            return frame
        frame = frame.f_back
    return None


def _result() -> Any:
    """Return what the compiled function returned; None if it raised, or if torch (before 2.12) did not keep it."""
    frame = _wrapper()
    return frame.f_locals.get("result") if frame is not None else None
