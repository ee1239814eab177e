"""Runs named modules in another format: autocast off (or in BF16), inputs cast, 16-bit weights converted.

Or casts their operands to narrow formats and back.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from precdoctor.recording.applying.ledger import Ledger
from precdoctor.recording.applying.operand_casts import OperandCasts
from precdoctor.recording.model.module_names import Names
from precdoctor.recording.process.attach import is_distributed
from precdoctor.recording.recorder.hook_guard import guarded
from precdoctor.recording.recorder.step_context import StepContext
from precdoctor.runlog.changes import Change

_HALF = (torch.float16, torch.bfloat16)
#: Runs a module's forward: the module, its forward, positional and keyword arguments.
Run = Callable[..., Any]


class ModuleFormats:
    """Finds the named modules in models when these are first called, and changes how their ``forward`` runs.

    The *class's* forward is patched and checks whether the module is one of them. Nothing is added to the module
    itself, so it can be copied, pickled and saved as before.
    """

    def __init__(self, context: StepContext, changes: Sequence[Change], ledger: Ledger) -> None:
        self._context = context
        self._changes = tuple(changes)
        self._ledger = ledger
        #: Not the recorder's names: ranks that are not recorded also make the changes.
        self._names = Names()
        self._version = self._names.version
        self._targets: weakref.WeakKeyDictionary[nn.Module, dict[Change, Run]] = weakref.WeakKeyDictionary()
        self._patched: set[type] = set()
        #: Modules whose forward is running: a subclass may call the forward of a base class that is also patched.
        self._running: set[int] = set()
        #: Names of roots that are to be changed themselves.
        self._roots = {change.root for change in self._changes if not change.module}

    def install(self) -> None:
        """Examine each module at its first call."""
        meet = guarded(self._context)(self._meet)

        def precdoctor_apply(module: nn.Module, _args: Any) -> None:
            if not torch.compiler.is_compiling() and self._names.find(module) is None:
                meet(module)

        nn.modules.module.register_module_forward_pre_hook(precdoctor_apply)
        if self._roots:
            self._meet_before_calls(precdoctor_apply)

    def _meet_before_calls(self, look: Callable[[nn.Module, Any], None]) -> None:
        """Examine modules ahead of ``_call_impl``, which looks ``forward`` up before its hooks run.

        Ends once all roots to be changed are known.
        """
        original: Callable[..., Any] = nn.Module._call_impl

        @functools.wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            look(module, args)
            if self._roots <= self._names.roots.keys():
                nn.Module._call_impl = original  # type: ignore[method-assign]
            return original(module, *args, **kwargs)

        nn.Module._call_impl = call  # type: ignore[method-assign, assignment]

    def _meet(self, module: nn.Module) -> None:
        """Look for named modules in all known models if a new model was called."""
        self._names.place(module, None)
        if self._names.version == self._version:
            return  # no new model: a loss module created anew each step
        self._version = self._names.version
        for root, model in self._names.models():
            for change in self._changes:
                if change.root in ("", root.name):
                    self._look_in(model, change)

    def _look_in(self, model: nn.Module, change: Change) -> None:
        """Change the module that a change names, if the model has it."""
        for module in model.modules():
            place = self._names.find(module)
            if place is not None and place.module == change.module and not place.is_wrapper:
                if change not in self._targets.get(module, ()):
                    self._take(module, change)
                return

    def _take(self, module: nn.Module, change: Change) -> None:
        """Make a module's forward run with a change."""
        if isinstance(module, torch.jit.ScriptModule):
            self._ledger.refused(change, "a scripted module cannot be changed")
            return
        run = self._casting(change) if change.setting == "module.casts" else self._converted(module, change)
        if run is None:
            return
        runs = self._targets.setdefault(module, {})
        runs[change] = run
        kind = type(module)
        if len(runs) > 1:
            return
        if "forward" in vars(module):  # a library has put it there; it hides that of the class
            own = module.forward
            module.forward = functools.wraps(own)(lambda *args, **kwargs: self._run(module, own, args, kwargs))
        elif kind not in self._patched:
            self._patched.add(kind)
            kind.forward = self._forward_of(kind.forward)

    def _casting(self, change: Change) -> Run | None:
        """Return a function that runs a forward with its operands cast; the change counts as done once it runs."""
        if is_distributed():
            self._ledger.refused(change, "casts are not applied under torch.distributed")
            return None
        casts = OperandCasts(self._context, change, self._ledger)
        self._ledger.pending(change, "its forward never ran, or only inside torch.compile or torch.func")

        def run(module: nn.Module, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None:
                return call(*args, **kwargs)
            self._ledger.done(change, f"{change.where}, {type(module).__name__}", None)
            return casts.run(module, call, *args, **kwargs)

        return run

    def _converted(self, module: nn.Module, change: Change) -> Run | None:
        """Convert a module whose 16-bit weights have another dtype than the change's; return a function that runs its
        forward in that dtype. None: refused.
        """
        dtype = torch.float32 if change.to == "float32" else torch.bfloat16
        narrow = [p for p in module.parameters() if p.dtype in _HALF and p.dtype is not dtype]
        if narrow and is_distributed():
            self._ledger.refused(change, "its 16-bit weights cannot be widened under torch.distributed")
            return None
        was = str(narrow[0].dtype).removeprefix("torch.") if narrow else None
        if narrow:
            module._apply(lambda x: x.to(dtype) if x.dtype in _HALF else x)  # FP32 parts stay as they are
        self._ledger.done(change, f"{change.where}, {type(module).__name__}", was or change.before)
        return lambda _module, call, /, *args, **kwargs: run_in(dtype, call, args, kwargs)

    def _forward_of(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._run(module, functools.partial(original, module), args, kwargs)

        return forward

    def _run(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a forward with all changes of the module; unchanged inside its own forward."""
        runs = self._targets.get(module)
        if not runs or id(module) in self._running:
            return call(*args, **kwargs)
        for run in runs.values():
            call = functools.partial(run, module, call)
        self._running.add(id(module))
        try:
            return call(*args, **kwargs)
        finally:
            self._running.discard(id(module))


def run_in(dtype: torch.dtype, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return ``call(*args, **kwargs)`` with floating-point tensors in ``dtype``. Autocast is off, or stays on in BF16.

    Under an enclosing autocast the result is FP32: autocast casts that where needed, but does not mix its 16-bit format
    with the other one. Otherwise the result gets the 16-bit format of the input back, in which later modules hold their
    weights.
    """
    given = _first_tensor((args, kwargs))
    device = given.device.type if given is not None else "cpu"
    outer = torch.is_autocast_enabled(device)
    enabled = outer and dtype is torch.bfloat16
    with torch.autocast(device, dtype=dtype if enabled else None, enabled=enabled):
        result = call(*_cast(args, dtype), **_cast(kwargs, dtype))
    if outer:
        return _cast(result, torch.float32)
    return _cast(result, given.dtype) if given is not None and given.dtype in _HALF else result


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return nested tuples, lists and dicts with floating-point tensors of at most 32 bits in ``dtype``."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype in (torch.float32, *_HALF) else value
    if isinstance(value, tuple):
        parts = [_cast(v, dtype) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if type(value) is list:
        return [_cast(v, dtype) for v in value]
    if type(value) is dict:
        return {k: _cast(v, dtype) for k, v in value.items()}
    return value


def _first_tensor(value: Any) -> Tensor | None:
    """Return the first floating-point tensor of at most 32 bits in nested containers; None if there is none."""
    if isinstance(value, Tensor):
        return value if value.dtype in (torch.float32, *_HALF) else None
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        return next((found for v in value if (found := _first_tensor(v)) is not None), None)
    return None
