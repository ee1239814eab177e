"""The module hooks: they record the batch, inputs without a row, and outputs, and put a gradient hook on each output.

The hooks are global, so that no module carries anything of ours: ``torch.save(model)``, ``deepcopy`` and the evaluation
fast path of ``TransformerEncoderLayer`` work as without them.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from precdoctor.recording.deepscan.window import StepWindow
from precdoctor.recording.fp8.fp8_casts import Casts
from precdoctor.recording.kernels.outside_user_modes import modes_open, only_estimates
from precdoctor.recording.model import tensor_leaves
from precdoctor.recording.model.module_names import Place
from precdoctor.recording.observe.call_frame import (
    EVALUATES,
    NOT_RECORDED,
    CallMode,
    Frame,
    has_no_identity,
    inner_mode,
    is_replica,
    root_mode,
)
from precdoctor.recording.observe.frozen_and_buffers import FrozenAndBuffers, RecordedTensors
from precdoctor.recording.observe.logits import Logits
from precdoctor.recording.observe.module_hooks import ModuleHooks, arguments_of_call, named_arguments
from precdoctor.recording.ops.dispatched_ops import sequence_number
from precdoctor.recording.ops.source_lines import calls_in_progress
from precdoctor.recording.recorder import Recorder
from precdoctor.recording.recorder.hook_guard import guarded
from precdoctor.recording.scene.loss_code import LossCode
from precdoctor.recording.scene.step_snapshot import Scene
from precdoctor.recording.slots.batched_launch import BatchedLaunch
from precdoctor.recording.slots.slot_table import Entry, Site
from precdoctor.recording.steps.optimizerless_steps import OptimizerlessSteps

if TYPE_CHECKING:
    from precdoctor.recording.observe.compiled_modules import Probes

_in_recompute: Callable[[], int] = torch._C._current_graph_task_id  # -1 outside a backward pass


class ForwardHooks:
    """The two global hooks and their shared state."""

    def __init__(
        self,
        recorder: Recorder,
        optimizerless: OptimizerlessSteps,
        scene: Scene,
        loss_code: LossCode,
        casts: Casts,
        frozen_and_buffers: FrozenAndBuffers,
        logits: Logits,
        window: StepWindow,
        probes: Probes | None,
    ) -> None:
        self._recorder, self._optimizerless, self._scene = recorder, optimizerless, scene
        self._loss_code, self._casts, self._logits, self._caches = loss_code, casts, logits, logits.caches
        self._window, self._probes = window, probes
        self._gradient_hook = guarded(recorder)(self._record_gradient)
        self._guarded_note_autocast = guarded(recorder)(self._note_autocast)
        self._seen = RecordedTensors(recorder)
        self._frozen_and_buffers, self._weights = frozen_and_buffers, BatchedLaunch()
        #: The output hooked last: a parent that returns its child's tensor adds no row, in recomputed checkpoints also.
        self._last_hooked: weakref.ref[Tensor] | None = None
        self.module_hooks = ModuleHooks(recorder, stay=probes is not None)
        self.module_hooks.let_go = self._let_go = guarded(recorder)(self._let_go_of_interrupted)
        #: By root and mode, of a call seen whole between samples: the autocast dtype that its forward enters itself.
        self._inner_autocast: dict[tuple[str, str], str | None] = {}
        recorder.when_forked.append(self._inner_autocast.clear)
        #: Called when a trained model has returned from a call without gradients.
        self.when_evaluated: Callable[..., None] = lambda *_: None

    def install(self) -> tuple[Callable[[nn.Module, Any], None], Callable[[nn.Module, Any, Any], None]]:
        """Register both hooks with torch, for every module of the process, and return them."""
        before, after = self._pre_hook(), self._post_hook()
        self.module_hooks.install(before, after)
        # torch.compile warns about global hooks. The user has none, and may have turned warnings into errors.
        warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")
        return before, after

    # Closures, and the test for compilation comes first: Dynamo traces into global hooks, and must find nothing there.

    def _pre_hook(self) -> Callable[[nn.Module, Any], None]:
        recorder, enter, let_go = self._recorder, guarded(self._recorder)(self._call_begins), self._let_go
        casts, hooks = self._casts, self.module_hooks

        def precdoctor_forward_pre(module: nn.Module, args: Any) -> None:
            if torch.compiler.is_compiling():
                return
            stack = None if recorder.live else getattr(recorder.local, "stack", None)
            if stack and not (module is stack[0].module and let_go(stack, module)):
                if self._autocast_is_new():
                    self._guarded_note_autocast(stack[-1].mode, stack[0])
                return  # between samples only top-level calls are recorded
            if modes_open() and only_estimates():
                return
            threads = recorder.threads
            if get_ident() != threads.own:
                if is_replica(module):
                    threads.meet_replica()
                    return
                if threads.elsewhere():
                    return
            if recorder.state == "armed" or (recorder.state == "idle" and recorder.arm()):
                enter(module, args)
            elif not casts.met:
                hooks.take_out()  # recording is off: modules then run as fast as without us

        return precdoctor_forward_pre

    def _post_hook(self) -> Callable[[nn.Module, Any, Any], None]:
        recorder, leave, casts = self._recorder, guarded(self._recorder)(self._call_ended), self._casts
        probes = self._probes

        def precdoctor_forward(module: nn.Module, _args: Any, result: Any) -> None:
            if torch.compiler.is_compiling():
                if probes is not None:
                    probes.traced(module, result)
                return
            threads = recorder.threads
            if (threads.others and threads.is_other()) or (threads.run_replicas and get_ident() != threads.own):
                return
            if casts.met:
                casts.left(module)  # must be first: the mode that it opened must not outlive the call
            if not recorder.live:
                stack = getattr(recorder.local, "stack", None)
                if not stack or stack[-1].module is not module:
                    return
            if recorder.state == "armed":
                leave(module, result)

        return precdoctor_forward

    # --- entering ----------------------------------------------------------------------------------------------------

    def _call_begins(self, module: nn.Module, args: Any) -> None:
        """Record that a module call begins; between samples, take the hooks out for the rest of a top-level call."""
        recorder = self._recorder
        stack: list[Frame] | None = getattr(recorder.local, "stack", None)
        if stack is None:
            stack = recorder.local.stack = recorder.threads.calls = []
        place = recorder.names.find(module)
        if stack and (place is None or place.module == ""):
            self._let_go_of_interrupted(stack, module)
        self._enter_call(module, place, args, stack)
        if not recorder.live and len(stack) == 1:
            self._take_hooks_out(module, stack[0])

    def _enter_call(self, module: nn.Module, place: Place | None, args: Any, stack: list[Frame]) -> None:
        recorder = self._recorder
        above = stack[-1] if stack else None
        if has_no_identity(module) or torch._C._get_tracing_state() is not None:
            stack.append(Frame(module, above.place if above else None, NOT_RECORDED))
            return
        recompute = _in_recompute() != -1
        if recompute:
            self.module_hooks.recomputes = True
        inside = above if above is not None and above.place is not None else None
        if inside is None and not recompute:
            self._optimizerless.forward_begins()
            if recorder.drain is None:
                recorder.claim.forward_begins(gradients=torch.is_grad_enabled())
        place = place or self._named_place(module, inside)
        if inside is None and not recompute and recorder.claim.forwards_are_steps:
            self._begin_step_of(module, place)
        root = recorder.names.roots[place.root]
        mode = root_mode(root, module, recompute) if inside is None else inner_mode(inside.mode)
        frame = Frame(module, place, mode)
        frame.outermost = inside is None or (inside.outermost and inside.place is not None and inside.place.is_wrapper)
        stack.append(frame)
        if recorder.live and mode.phase and recorder.wants(place):
            frame.recorded, frame.first_node = True, sequence_number()
        if place.is_wrapper:  # among wrappers, only a compiled model has rows that the wrapped module lacks
            frame.recorded = frame.recorded and type(module).__name__ == "OptimizedModule"
        elif frame.recorded:
            frame.call = recorder.next_call(place, "recompute" if recompute else mode.name)
        if torch._C._is_any_autocast_enabled() and self._autocast_is_new():
            self._note_autocast(mode, stack[0] if len(stack) > 1 else None)  # frameworks enter autocast inside forward
        if inside is None:
            self._enter_root(frame, place.root, args, recompute=recompute)
        if frame.recorded and not recompute:
            self._record_inputs(frame, named_arguments(args))
        if inside is None and not recompute:
            self._look_at_ops(frame, args)
        if self._casts.met:
            arguments = named_arguments(args) if self._casts.looks_at(module) else {}
            self._casts.entered(frame, arguments, recompute=recompute)

    def _let_go_of_interrupted(self, stack: list[Frame], module: nn.Module | None = None) -> bool:
        """Drop the calls that an interrupt ended (torch then runs no hooks), as ``module`` is about to be called.

        Returns:
            Whether the calls of ``stack`` are over; it is then empty.
        """
        first = stack[0]
        root = self._recorder.names.roots.get(first.place.root) if first.place is not None else None
        visible = root is not None and root.is_visible
        if not visible or calls_in_progress(first.module) > (module is first.module):
            return False
        while stack:
            self._call_ended(stack[0].module, None)
        return True

    def _named_place(self, module: nn.Module, inside: Frame | None) -> Place:
        parent, caller = (None, None) if inside is None else (inside.place, inside.module)
        return self._recorder.names.place(module, parent, caller)

    def _enter_root(self, frame: Frame, root: str, args: Any, *, recompute: bool) -> None:
        """Store what a replay or a trace of a top-level call needs."""
        recorder = self._recorder
        if recorder.live:
            recorder.names.roots[root].is_visible = calls_in_progress(frame.module, _NEAR) > 0
        frame.reopens = self._loss_code.root_begins(frame.module)
        if self._probes is not None:
            self._probes.meet(frame.module)
        if recompute:
            return
        if recorder.trace is not None:
            recorder.trace.root_called(frame.module, root, named_arguments(args))
        if not self._scene.enabled:
            return
        if frame.mode.phase and (torch.is_grad_enabled() or frame.mode.delegated):
            frame.kept = self._scene.enter(frame.module, root, args, arguments_of_call()[1])
        else:
            evaluates = frame.mode is EVALUATES
            frame.judged = evaluates or (frame.mode.name == "no_grad" and recorder.names.roots[root].trained)

    def _look_at_ops(self, frame: Frame, args: Any) -> None:
        """Of a top-level call, open a scan of all ops if one is due, and on sampled steps follow caches and logits."""
        mode, recorder = frame.mode, self._recorder
        if self._logits.mode is not None:
            self._logits.close()  # still open for another root's loss; a scan must not begin beside it
        if mode.phase == "train" and not mode.delegated and (recorder.drain is not None or recorder.claim.may_train):
            self._window.enter_root(frame.module)
            if self._window.is_open:
                self._window.root_called(frame.module, named_arguments(args))
        if self._recorder.live and self._caches.takes():
            self._caches.root_begins(frame, named_arguments(args))
        if self._recorder.live:
            self._logits.root_begins(frame)

    def _begin_step_of(self, module: nn.Module, place: Place) -> None:
        """In an inference run, begin a step as a model is called; record weights and buffers written to since."""
        recorder = self._recorder
        recorder.claim.model_begins(recorder.names.roots[place.root])
        if recorder.live:
            with self._weights as together:
                self._frozen_and_buffers.record(module, together)

    def _autocast_is_new(self) -> bool:
        """Return whether autocast is on and the step's facts do not have its dtype yet."""
        return self._recorder.current.autocast_dtype is None and torch._C._is_any_autocast_enabled()

    def _take_hooks_out(self, module: nn.Module, frame: Frame) -> None:
        """Between samples, take the hooks out until this top-level call returns; the first call stays visible."""
        recorder = self._recorder
        if frame.module is not module or _in_recompute() != -1:
            return
        place, mode = frame.place, frame.mode
        if place is None or recorder.current.step == recorder.options.first_step:
            return  # before the first step ended, another thread may still become the recorded one
        if (key := (place.root, mode.name)) not in self._inner_autocast:
            self._inner_autocast[key] = None
            return
        if recorder.current.autocast_dtype is None:
            recorder.current.autocast_dtype = self._inner_autocast[key]
        self.module_hooks.rest_inside(module)

    def _note_autocast(self, mode: CallMode, outermost: Frame | None = None) -> None:
        """Store the autocast dtype in the step's facts; ``outermost`` is the root call whose forward entered it."""
        for device in () if mode.evaluating else ("cuda", "cpu"):
            if torch.is_autocast_enabled(device):
                recorder, dtype = self._recorder, str(torch.get_autocast_dtype(device)).removeprefix("torch.")
                recorder.current.autocast_dtype = dtype
                if outermost is not None and outermost.place is not None:
                    self._inner_autocast[outermost.place.root, outermost.mode.name] = dtype
                if recorder.facts is not None:
                    recorder.facts.autocast(device, dtype)

    def _record_inputs(self, frame: Frame, given: dict[Any, Any]) -> None:
        """Record the arguments of a call that have no row yet; keys are positions and keywords."""
        recorder = self._recorder
        for name, x in tensor_leaves.floating(given, objects=frame.outermost):
            if self._seen.storage_of(x) or issubclass(type(x), nn.Parameter) or recorder.names.parameter(x) is not None:
                continue  # weights and buffers have their own rows
            if (dense := tensor_leaves.plain(x)) is not None:
                kind = "batch" if frame.outermost and x.grad_fn is None else "input"
                self._measure(frame, kind, name, x, dense)

    # --- leaving -----------------------------------------------------------------------------------------------------

    def _call_ended(self, module: nn.Module, result: Any) -> None:
        """Record the end of a module call; ``result`` is None if it raised."""
        stack: list[Frame] = getattr(self._recorder.local, "stack", [])
        for depth in range(len(stack) - 1, -1, -1):
            if stack[depth].module is module:
                break
        else:
            return  # the call began before recording did
        frame = stack[depth]
        del stack[depth:]
        if not stack and self._window.is_open:
            self._window.leave_root(module, result)
        if not stack and self._logits.mode is not None:
            self._logits.root_ended(frame, loss_follows=result is not None and torch.is_grad_enabled())
        if not stack and self._caches.given is not None:
            self._caches.root_ended(frame, result)
        if self._casts.met:
            self._casts.ended(frame)
        if result is None:
            return
        if frame.recorded:
            self._record_outputs(frame, result)
        if not stack and self._recorder.claim.forwards_are_steps:
            self._recorder.claim.model_ended()
        if frame.judged and frame.place is not None:
            self.when_evaluated(module, frame.place.root, result, arguments_of_call)
        if frame.kept is not None:
            self._scene.leave(frame.kept, result)
            frame.reopens = True
        if frame.reopens and self._loss_code.supported:
            self._loss_code.open()

    def _record_outputs(self, frame: Frame, result: Any) -> None:
        """Record the outputs that have no row yet, and hook their gradients; while recomputing, only hook them."""
        recorder, place = self._recorder, frame.place
        assert place is not None, "the call is recorded"
        recompute = _in_recompute() != -1
        for name, x in tensor_leaves.floating(result):
            if (self._last_hooked is not None and self._last_hooked() is x) if recompute else self._seen.tensor(x):
                continue  # a parent that returns its child's tensor adds no row
            dense = tensor_leaves.plain(x)
            if dense is None:
                continue
            if not recompute:
                self._measure(frame, "output", name, x, dense)
            if x.requires_grad and x.grad_fn is not None:
                self._last_hooked = weakref.ref(x)
                evaluating = frame.mode.evaluating
                site = recorder.slots.site(place, "grad_output", name, x, call=frame.call, evaluating=evaluating)
                x.register_hook(functools.partial(self._gradient_hook, site))

    def _record_gradient(self, site: Site, grad: Tensor | None) -> None:
        """Record the gradient of an output as the backward pass reaches it."""
        recorder = self._recorder
        if (root := recorder.names.roots.get(site.place.root)) is not None:
            root.trained = True
        if grad is None or not recorder.live or not recorder.in_backward:
            return  # compiled graphs pass None for a gradient that does not exist
        entry = recorder.measure(site.place, site.kind, site.name, grad, call=site.call, evaluating=site.evaluating)
        if entry is not None and site.evaluating:
            self._mark_as_training(entry)

    def _mark_as_training(self, entry: Entry) -> None:
        """Keep all rows of a root in evaluation mode whose outputs got a gradient: that forward was training."""
        for other in self._recorder.slots.evaluations():
            if other.site.place.root == entry.site.place.root and other.site.phase == "train":
                other.reached_by_backward = True

    # --- shared ------------------------------------------------------------------------------------------------------

    def _measure(self, frame: Frame, kind: str, name: str, x: Tensor, dense: Tensor) -> None:
        assert frame.place is not None
        call, phase, evaluating = frame.call, frame.mode.phase, frame.mode.evaluating
        self._recorder.measure(frame.place, kind, name, x, dense, call=call, phase=phase, evaluating=evaluating)
        self._seen.add(x)


#: Most Python frames between a hook and the module call that runs it.
_NEAR = 16
