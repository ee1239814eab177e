"""The module hooks: batch, inputs nobody has recorded yet, outputs, and a gradient hook on every output.

They are global, so no module carries anything of ours: ``torch.save(model)``, ``deepcopy`` and the evaluation fast path
of ``TransformerEncoderLayer`` stay as they are.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from precdoctor.recording import leaves
from precdoctor.recording.naming import Place
from precdoctor.recording.recorder import Recorder, guarded
from precdoctor.recording.slots import Entry, Site

_in_recompute: Callable[[], int] = torch._C._current_graph_task_id  # -1 outside a backward pass


class _Frame:
    """One module call in progress."""

    __slots__ = ("call", "mode", "module", "place", "recorded")

    def __init__(self, module: nn.Module, place: Place | None, call: int, mode: _Mode, recorded: bool) -> None:
        self.module = module
        self.place = place
        self.call = call
        self.mode = mode
        self.recorded = recorded


class _Mode:
    """What a root call's rows are marked with; shared by all calls below it."""

    __slots__ = ("evaluating", "phase", "root")

    def __init__(self, root: str, phase: str, evaluating: bool) -> None:
        self.root = root
        self.phase = phase
        self.evaluating = evaluating


class Forward:
    """The two global hooks and what they share."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._enter = guarded(recorder)(self._entered)
        self._leave = guarded(recorder)(self._left)
        #: Tensors already covered by a row in this step: storage address -> (tensor, version). A live tensor keeps its
        #: address from being used again, so a dead reference means "not seen".
        self._seen: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._seen_step = (-1, -1)
        #: The output hooked last: while a checkpoint is recomputed, a parent that returns its child's tensor adds nothing.
        self._last_hooked: weakref.ref[Tensor] | None = None

    def install(self) -> None:
        """Register both hooks with torch, for every module of the process."""
        nn.modules.module.register_module_forward_pre_hook(self._pre_hook())
        nn.modules.module.register_module_forward_hook(self._post_hook(), with_kwargs=True, always_call=True)

    # Plain functions, and the test for compilation first: Dynamo traces into global hooks, and must find nothing there.

    def _pre_hook(self) -> Callable[[nn.Module, Any], None]:
        recorder, enter = self._recorder, self._enter

        def precdoctor_forward_pre(module: nn.Module, args: Any) -> None:
            if torch.compiler.is_compiling():
                return
            if recorder.state == "armed" or (recorder.state == "idle" and recorder.arm()):
                enter(module, args)

        return precdoctor_forward_pre

    def _post_hook(self) -> Callable[[nn.Module, Any, Any, Any], None]:
        recorder, leave = self._recorder, self._leave

        def precdoctor_forward(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            if torch.compiler.is_compiling():
                return
            if recorder.state == "armed":
                leave(module, result)

        return precdoctor_forward

    # --- entering ----------------------------------------------------------------------------------------------------

    def _stack(self) -> list[_Frame]:
        local = self._recorder.local
        if not hasattr(local, "stack"):
            local.stack = []
        stack: list[_Frame] = local.stack
        return stack

    def _entered(self, module: nn.Module, args: Any) -> None:
        recorder, stack = self._recorder, self._stack()
        above = stack[-1] if stack else None
        if isinstance(module, torch.fx.GraphModule) or _skipped(module) or torch.jit.is_tracing():
            stack.append(_Frame(module, above.place if above else None, 0, _NOT_RECORDED, recorded=False))
            return
        recompute = _in_recompute() != -1
        place = recorder.names.place(module, above.place if above else None)
        mode = (
            above.mode if above is not None and above.place is not None else self._root_mode(module, place, recompute)
        )
        recorded = recorder.live and mode is not _NOT_RECORDED and recorder.wants(place)
        kind = "recompute" if recompute else ("eval" if mode.evaluating else "train")
        if place.is_wrapper:  # of these only a compiled model says what its inside does not
            recorded = recorded and type(module).__name__ == "OptimizedModule"
        call = recorder.next_call(place, kind) if recorded and not place.is_wrapper else 0
        frame = _Frame(module, place, call, mode, recorded)
        stack.append(frame)
        if recorded and not recompute:
            given = {**dict(enumerate(args)), **_keyword_arguments()}
            self._record_inputs(frame, given, is_root=above is None)

    def _root_mode(self, module: nn.Module, place: Place, recompute: bool) -> _Mode:
        """How a top-level call is recorded: training, no-grad inside training, evaluation (perhaps), or not at all."""
        if recompute:
            return _Mode(place.root, "train", evaluating=False)
        recorder = self._recorder
        root = recorder.names.roots[place.root]
        grad = torch.is_grad_enabled()
        if not module.training and not grad and root.trained:
            return _NOT_RECORDED
        if recorder.live:
            self._note_autocast()
        return _Mode(place.root, "train" if grad else "no_grad", evaluating=not module.training)

    def _note_autocast(self) -> None:
        recorder = self._recorder
        for device in ("cuda", "cpu"):
            if torch.is_autocast_enabled(device):
                dtype = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
                recorder.current.autocast_dtype = dtype
                if recorder.facts is not None:
                    recorder.facts.autocast(device, dtype)

    def _record_inputs(self, frame: _Frame, given: dict[Any, Any], *, is_root: bool) -> None:
        recorder = self._recorder
        for name, x in leaves.tensors(given):
            if not x.is_floating_point() and not x.is_complex():
                continue
            dense = leaves.plain(x)
            if dense is None or self._covered(x):
                continue
            from_data = is_root and x.grad_fn is None and not isinstance(x, nn.Parameter)
            assert frame.place is not None
            if isinstance(x, nn.Parameter) or recorder.names.parameter(x) is not None:
                continue  # weights and buffers have rows of their own
            recorder.measure(self._site(frame, "batch" if from_data else "input", name, x), x, dense)
            self._cover(x)

    # --- leaving -----------------------------------------------------------------------------------------------------

    def _left(self, module: nn.Module, result: Any) -> None:
        stack = self._stack()
        while stack:
            frame = stack.pop()
            if frame.module is module:
                break
        else:
            return
        if frame.recorded and result is not None:
            self._record_outputs(frame, result)

    def _record_outputs(self, frame: _Frame, result: Any) -> None:
        recorder = self._recorder
        recompute = _in_recompute() != -1
        for name, x in leaves.tensors(result):
            if not x.is_floating_point() and not x.is_complex():
                continue
            dense = leaves.plain(x)
            if dense is None or (self._was_hooked_last(x) if recompute else self._same_tensor(x)):
                continue
            if not recompute:
                recorder.measure(self._site(frame, "output", name, x), x, dense)
                self._cover(x)
            if x.requires_grad and x.grad_fn is not None:
                self._last_hooked = weakref.ref(x)
                x.register_hook(self._gradient_hook(self._site(frame, "grad_output", name, x)))

    def _gradient_hook(self, site: Site) -> Callable[[Tensor], None]:
        recorder = self._recorder

        @guarded(recorder)
        def precdoctor_grad(grad: Tensor) -> None:
            root = recorder.names.roots.get(site.place.root)
            if root is not None:
                root.trained = True
            if not recorder.live or not recorder.in_backward:
                return
            own = recorder.site(site.place, site.kind, site.name, grad, call=site.call, evaluating=site.evaluating)
            entry = recorder.measure(own, grad)
            if entry is not None and site.evaluating:
                self._reached(entry)

        return precdoctor_grad

    def _reached(self, entry: Entry) -> None:
        """An evaluation-mode forward took part in training after all: keep everything of its root."""
        for other in self._recorder.slots.evaluations():
            if other.site.place.root == entry.site.place.root and other.site.phase == "train":
                other.reached_by_backward = True

    # --- shared ------------------------------------------------------------------------------------------------------

    def _site(self, frame: _Frame, kind: str, name: str, x: Tensor) -> Site:
        assert frame.place is not None
        mode = frame.mode
        return self._recorder.site(
            frame.place, kind, name, x, call=frame.call, phase=mode.phase, evaluating=mode.evaluating
        )

    def _cover(self, x: Tensor) -> None:
        now = (self._recorder.step, self._recorder.micro_step)
        if now != self._seen_step:
            self._seen.clear()
            self._seen_step = now
        self._seen[x.untyped_storage()._cdata if x.layout is torch.strided else id(x)] = (weakref.ref(x), _version(x))

    def _covered(self, x: Tensor) -> bool:
        """Whether a row of this forward already speaks of this tensor, or of one it is a view of."""
        found = self._seen.get(x.untyped_storage()._cdata if x.layout is torch.strided else id(x))
        return found is not None and found[0]() is not None and found[1] == _version(x)

    def _same_tensor(self, x: Tensor) -> bool:
        """Whether this very tensor is already recorded: a parent that returns its child's output adds nothing."""
        found = self._seen.get(x.untyped_storage()._cdata if x.layout is torch.strided else id(x))
        return found is not None and found[0]() is x and found[1] == _version(x)

    def _was_hooked_last(self, x: Tensor) -> bool:
        return self._last_hooked is not None and self._last_hooked() is x


_NOT_RECORDED = _Mode("", "", evaluating=False)


def _skipped(module: nn.Module) -> bool:
    """Scripted modules and DataParallel replicas have no identity of their own."""
    return isinstance(module, torch.jit.ScriptModule) or getattr(module, "_is_replica", False)


def _version(x: Tensor) -> int:
    return -1 if x.is_inference() else x._version


def _keyword_arguments() -> dict[str, Any]:
    """The keyword arguments of the module call whose global pre-hook is running.

    Global pre-hooks are not given them, and models of the transformers library take nothing else. ``_call_impl`` has
    them in a variable; :func:`keyword_arguments_are_visible` tells whether this torch still does.
    """
    frame = sys._getframe(1)
    for _ in range(8):
        if frame.f_code.co_name in ("inner", "_call_impl"):
            found = frame.f_locals.get("kwargs")
            return found if isinstance(found, dict) else {}
        if frame.f_back is None:
            break
        frame = frame.f_back
    return {}


def keyword_arguments_are_visible() -> bool:
    """Feature test of :func:`_keyword_arguments` on this torch."""
    seen: list[dict[str, Any]] = []

    class Probe(nn.Module):
        def forward(self, *, x: int) -> int:
            return x

    handle = nn.modules.module.register_module_forward_pre_hook(lambda _m, _a: seen.append(_keyword_arguments()))
    try:
        Probe()(x=1)
    finally:
        handle.remove()
    return bool(seen) and seen[0].get("x") == 1
