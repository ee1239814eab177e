"""Puts the two global module hooks in and takes them out: on sampled steps they see every call, else top-level calls.

One global hook sends every module call of the process through torch's slow path, and each call through two Python
functions. Between samples only the top-level call matters. So as it begins, our pre-hook takes both hooks out of
torch's global tables and puts one on that module, which puts them back as the call returns or raises. On an unsampled
step they are also out during the backward pass, once a checkpoint has recomputed a module in one.

They stay in if taking them out could change the training:

- once ``torch.compile`` is in use, because Dynamo recompiles when these tables change;
- beside global hooks of others, and on modules with forward hooks of their own: those keep their order;
- while several threads use models, because all threads share the tables;
- in the first call of each top-level module, which reveals whether its forward enters autocast.
"""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import nn

from precdoctor.recording.model import static
from precdoctor.recording.ops.dispatched_ops import something_is_compiled
from precdoctor.recording.process import attach
from precdoctor.recording.recorder.step_context import StepContext

#: Modules that choose another implementation if they, or a part of them, have hooks.
_LOOK_FOR_HOOKS = (nn.TransformerEncoderLayer, nn.MultiheadAttention)


class _Return:
    """The hook on a top-level module whose call is in progress.

    A copy or pickle of the module gets a harmless hook instead, which can be loaded without precdoctor.
    """

    def __init__(self, hooks: ModuleHooks) -> None:
        self._hooks = hooks

    def __call__(self, module: nn.Module, args: Any, result: Any) -> None:
        self._hooks.resume()
        self._hooks.after(module, args, result)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


class ModuleHooks:
    """The two global hooks, and whether they are in torch's tables."""

    def __init__(self, context: StepContext, *, stay: bool = False) -> None:
        self._context = context
        #: Drops the calls of a thread that an interrupt has ended; set by the forward hooks.
        self.let_go: Callable[[list[Any]], Any] = lambda _stack: None
        self._return = _Return(self)
        self._before: Callable[[nn.Module, Any], None]
        self.after: Callable[[nn.Module, Any, Any], None]
        #: Torch's tables, and the keys of our hooks in them.
        self._pre_hooks: Any = nn.modules.module._global_forward_pre_hooks
        self._post_hooks: Any = nn.modules.module._global_forward_hooks
        self._keys = (0, 0)
        #: Whether the hooks are out; the tables of the module that has the third hook meanwhile.
        self.out = False
        self._module_tables: tuple[Any, ...] = ()
        #: Whether modules have been called in a backward pass.
        self.recomputes = False
        #: Never take the hooks out again: something was compiled, or torch stores its hooks differently.
        self.stay = stay or not _is_supported()

    def install(self, before: Callable[[nn.Module, Any], None], after: Callable[[nn.Module, Any, Any], None]) -> None:
        """Register both hooks with torch, for every module of the process."""
        self._before, self.after = before, after
        first = nn.modules.module.register_module_forward_pre_hook(before)
        # Without kwargs: after an exception torch calls global hooks without them, whatever they were registered with.
        second = nn.modules.module.register_module_forward_hook(after, always_call=True)
        self._keys = first.id, second.id
        self._context.when_forked.append(self.resume)  # also called when recording begins anew

    # --- taking the hooks out and putting them in --------------------------------------------------------------------

    def rest_inside(self, module: nn.Module) -> None:
        """Take both hooks out until the call of a top-level module, which is about to run, returns or raises."""
        hooks: Any = dict.get(static.module_dict(module), "_forward_hooks")
        always: Any = dict.get(static.module_dict(module), "_forward_hooks_always_called")
        if type(hooks) is not OrderedDict or hooks or type(always) is not OrderedDict:
            return
        if issubclass(type(module), _LOOK_FOR_HOOKS) or not self.take_out():
            return
        self._module_tables = hooks, always
        for table, value in ((always, True), (hooks, self._return)):
            table[self._keys[1]] = value

    def resume(self) -> None:
        """Put both hooks back in; do nothing if they are in."""
        if not self.out:
            return
        first, second = self._keys
        for table in self._module_tables:
            # If a hook was registered after ours, torch may be iterating over the table right now.
            if table and next(reversed(table)) == second:
                del table[second]
        self.out, self._module_tables = False, ()
        self._pre_hooks[first], self._post_hooks[second] = self._before, self.after
        if len(self._pre_hooks) > 1:
            self._pre_hooks.move_to_end(first, last=False)  # they were alone before, so they go first
        if len(self._post_hooks) > 1:
            self._post_hooks.move_to_end(second, last=False)

    def compiles(self) -> None:
        """Put the hooks back for good, because something is about to be compiled."""
        self.stay = True
        self.resume()

    def take_out(self) -> bool:
        """Take both hooks out until :meth:`resume`, unless that could change the training. Return whether it did so."""
        if self.stay or self.out or self._context.threads.others:
            return False
        if len(self._pre_hooks) != 1 or len(self._post_hooks) != 1:
            return False
        if self._keys[0] not in self._pre_hooks or self._keys[1] not in self._post_hooks:
            return False
        self.stay = something_is_compiled()
        if self.stay:
            return False
        self.out = True
        self._pre_hooks.pop(self._keys[0], None)
        self._post_hooks.pop(self._keys[1], None)
        return True


def _is_supported() -> bool:
    """Test on a module whether torch reads its hook tables again before and after the forward."""
    tables: Any = nn.modules.module
    found = [getattr(tables, name, None) for name in ("_global_forward_pre_hooks", "_global_forward_hooks")]
    if any(type(table) is not OrderedDict or table for table in found):
        return False
    seen: list[str] = []
    probe = nn.Module()
    probe.forward = lambda: None

    def leave(_module: nn.Module, _args: Any, _result: Any) -> None:
        seen.append("after")

    def enter(module: nn.Module, _args: Any) -> None:
        seen.append("before")
        handle.remove()
        module._forward_hooks[-1] = leave

    handle = tables.register_module_forward_pre_hook(enter)
    try:
        probe()
    except (AttributeError, KeyError, TypeError, RuntimeError) as error:
        attach.let_through(error)
        return False
    finally:
        handle.remove()
    return seen == ["before", "after"]


def named_arguments(args: tuple[Any, ...]) -> dict[Any, Any]:
    """Return the arguments of the module call whose global pre-hook got ``args``, by position and keyword."""
    return {**dict(enumerate(args)), **arguments_of_call()[1]}


def arguments_of_call() -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments of the module call whose global hook is running.

    Torch does not pass keyword arguments to global hooks. They are a local variable of ``_call_impl``, and of the
    function that calls a module compiled in place; :func:`keyword_arguments_are_visible` tests whether this torch
    still has it.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(12):
        if frame is None:
            break
        if frame.f_code.co_name in ("inner", "_call_impl", "compile_wrapper", "_fn"):
            args, kwargs = frame.f_locals.get("args"), frame.f_locals.get("kwargs")
            return args if type(args) is tuple else (), kwargs if type(kwargs) is dict else {}
        frame = frame.f_back
    return (), {}


def keyword_arguments_are_visible() -> bool:
    """Test whether :func:`arguments_of_call` works with this torch."""
    seen: list[dict[Any, Any]] = []

    class Probe(nn.Module):
        def forward(self, *, x: int) -> int:
            return x

    handle = nn.modules.module.register_module_forward_pre_hook(lambda _m, _a: seen.append(named_arguments(())))
    try:
        Probe()(x=1)
    finally:
        handle.remove()
    return bool(seen) and seen[0].get("x") == 1
