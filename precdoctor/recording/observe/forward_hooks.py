"""The module hooks: batch, inputs nobody has recorded yet, outputs, and a gradient hook on every output.

They are global, so no module carries anything of ours: ``torch.save(model)``, ``deepcopy`` and the evaluation fast path
of ``TransformerEncoderLayer`` stay as they are.
"""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from precdoctor.recording.deepscan.window import StepWindow
from precdoctor.recording.fp8.cast_scope import node_number
from precdoctor.recording.fp8.fp8_casts import Casts
from precdoctor.recording.kernels.outside_user_modes import modes_open, only_estimates
from precdoctor.recording.model import static, tensor_leaves
from precdoctor.recording.model.module_names import Place
from precdoctor.recording.observe.call_frame import (
    STAGES,
    CallMode,
    Frame,
    asks_for_shapes,
    has_no_identity,
    inner_mode,
    inside_function,
    is_replica,
)
from precdoctor.recording.observe.frozen_and_buffers import FrozenAndBuffers, RecordedTensors
from precdoctor.recording.observe.logits import Logits
from precdoctor.recording.observe.module_hooks import ModuleHooks, keyword_arguments
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
    """The two global hooks and what they share."""

    def __init__(
        self,
        recorder: Recorder,
        manual: OptimizerlessSteps,
        scene: Scene,
        loss_code: LossCode,
        casts: Casts,
        logits: Logits,
        window: StepWindow,
        probes: Probes | None,
    ) -> None:
        self._recorder, self._manual, self._scene = recorder, manual, scene
        self._loss_code, self._casts, self._logits, self._caches = loss_code, casts, logits, logits.caches
        self._window, self._probes = window, probes
        self._enter = guarded(recorder)(self._entered)
        self._leave = guarded(recorder)(self._left)
        self._came = guarded(recorder)(self._gradient_came)
        self._guarded_note_autocast = guarded(recorder)(self._note_autocast)
        self._seen = RecordedTensors(recorder)
        self._standing, self._weights = FrozenAndBuffers(recorder, casts), BatchedLaunch()
        #: The output hooked last: also in recomputed checkpoints, parents that return their child's tensor add nothing.
        self._last_hooked: weakref.ref[Tensor] | None = None
        self.module_hooks = ModuleHooks(recorder, stay=probes is not None)
        self.module_hooks.let_go = self._let_go = guarded(recorder)(self._let_go_of_interrupted)
        #: By root and mode, once a call between samples was seen whole: the autocast that its forward enters by itself.
        self._inner_autocast: dict[tuple[str, str], str | None] = {}
        recorder.when_forked.append(self._inner_autocast.clear)

    def install(self) -> tuple[Callable[[nn.Module, Any], None], Callable[[nn.Module, Any, Any], None]]:
        """Register both hooks with torch, for every module of the process; returns them."""
        before, after = self._pre_hook(), self._post_hook()
        self.module_hooks.install(before, after)
        # A compiled model notices that somebody has hooks; the user has none, and may have turned warnings into errors.
        warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")
        return before, after

    # Plain functions, and the test for compilation first: Dynamo traces into global hooks, and must find nothing there.

    def _pre_hook(self) -> Callable[[nn.Module, Any], None]:
        recorder, enter, let_go = self._recorder, self._enter, self._let_go
        casts, hooks = self._casts, self.module_hooks

        def precdoctor_forward_pre(module: nn.Module, args: Any) -> None:
            if torch.compiler.is_compiling():
                return
            stack = None if recorder.live else getattr(recorder.local, "stack", None)
            if stack and not (module is stack[0].module and let_go(stack, module)):
                if self._autocast_is_new():
                    self._guarded_note_autocast(stack[-1].mode, stack[0])
                return  # between samples only top-level calls count
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
                hooks.leave_if_off()

        return precdoctor_forward_pre

    def _post_hook(self) -> Callable[[nn.Module, Any, Any], None]:
        recorder, leave, casts = self._recorder, self._leave, self._casts
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
                casts.left(module)  # first of all: what it has opened must not outlive the call
            if not recorder.live:
                stack = getattr(recorder.local, "stack", None)
                if not stack or stack[-1].module is not module:
                    return
            if recorder.state == "armed":
                leave(module, result)

        return precdoctor_forward

    # --- entering ----------------------------------------------------------------------------------------------------

    def _stack(self) -> list[Frame]:
        local = self._recorder.local
        stack: list[Frame] | None = getattr(local, "stack", None)
        if stack is None:
            stack = local.stack = self._recorder.threads.calls = []
        return stack

    def _entered(self, module: nn.Module, args: Any) -> None:
        stack, place = self._stack(), self._recorder.names.find(module)
        if stack and (place is None or place.module == ""):
            self._let_go_of_interrupted(stack, module)
        self._enter_call(module, place, args, stack)
        if not self._recorder.live and len(stack) == 1:
            self._rest(module, stack[0])

    def _enter_call(self, module: nn.Module, place: Place | None, args: Any, stack: list[Frame]) -> None:
        recorder = self._recorder
        above = stack[-1] if stack else None
        if has_no_identity(module) or torch._C._get_tracing_state() is not None:
            stack.append(Frame(module, above.place if above else None, _NOT_RECORDED))
            return
        recompute = _in_recompute() != -1
        if recompute:
            self.module_hooks.recomputes = True
        inside = above if above is not None and above.place is not None else None
        if inside is None and not recompute:
            self._manual.forward_begins()
            if recorder.drain is None:
                recorder.claim.forward_begins(gradients=torch.is_grad_enabled())
        place = place or self._new_place(module, inside)
        if inside is None and not recompute and recorder.claim.forwards_are_steps:
            self._begin_step_of(module, place)
        mode = self._root_mode(module, place, recompute) if inside is None else inner_mode(inside.mode)
        frame = Frame(module, place, mode)
        frame.outermost = inside is None or (inside.outermost and inside.place is not None and inside.place.is_wrapper)
        stack.append(frame)
        if recorder.live and mode is not _NOT_RECORDED and recorder.wants(place):
            frame.recorded, frame.first_node = True, node_number()
        if place.is_wrapper:  # of these only a compiled model has rows that its inside lacks
            frame.recorded = frame.recorded and type(module).__name__ == "OptimizedModule"
        elif frame.recorded:
            frame.call = recorder.next_call(place, "recompute" if recompute else mode.name)
        if torch._C._is_any_autocast_enabled() and self._autocast_is_new():
            self._note_autocast(mode, stack[0] if len(stack) > 1 else None)  # frameworks enter it inside the forward
        if inside is None:
            self._enter_root(frame, place.root, args, recompute=recompute)
        if frame.recorded and not recompute:
            self._record_inputs(frame, {**dict(enumerate(args)), **keyword_arguments()})
        if inside is None and not recompute:
            self._look_at_ops(frame, args)
        if self._casts.met:
            named = self._casts.looks_at(module)
            arguments: dict[Any, Any] = dict(enumerate(args)) if named else {}
            arguments.update(keyword_arguments() if named else {})
            self._casts.entered(frame, arguments, recompute=recompute)

    def _let_go_of_interrupted(self, stack: list[Frame], module: nn.Module | None = None) -> bool:
        """A keyboard interrupt, or what else is no ``Exception``, leaves calls without any hook being called.

        Args:
            stack: the calls that this thread seems to be in.
            module: whose call is about to begin.

        Returns:
            Whether they are over, and the stack is empty now.
        """
        first = stack[0]
        root = self._recorder.names.roots.get(first.place.root) if first.place is not None else None
        visible = root is not None and root.is_visible
        if not visible or calls_in_progress(first.module) > (module is first.module):
            return False
        while stack:
            self._left(stack[0].module, None)
        return True

    def _new_place(self, module: nn.Module, inside: Frame | None) -> Place:
        parent, caller = (None, None) if inside is None else (inside.place, inside.module)
        return self._recorder.names.place(module, parent, caller)

    def _enter_root(self, frame: Frame, root: str, args: Any, *, recompute: bool) -> None:
        """Of a top-level call: what is kept for a replay of it."""
        recorder = self._recorder
        if recorder.live:
            recorder.names.roots[root].is_visible = calls_in_progress(frame.module, _NEAR) > 0
        frame.reopens = self._loss_code.root_begins(frame.module)
        if self._probes is not None:
            self._probes.meet(frame.module)
        if recompute:
            return
        if recorder.trace is not None:
            recorder.trace.root_called(frame.module, root, {**dict(enumerate(args)), **keyword_arguments()})
        if self._scene.enabled and frame.mode is not _NOT_RECORDED and torch.is_grad_enabled():
            frame.kept = self._scene.enter(frame.module, root, args, keyword_arguments())

    def _look_at_ops(self, frame: Frame, args: Any) -> None:
        """Of a top-level call: on steps that are scanned at all of them, on sampled ones at those that read logits."""
        mode, recorder = frame.mode, self._recorder
        if self._logits.follows:
            self._logits.close()  # of another root's loss: a scan does not begin beside it
        if mode.phase == "train" and not mode.delegated and (recorder.drain is not None or recorder.claim.patient):
            self._window.enter_root(frame.module)
            if self._window.is_open:
                self._window.root_called(frame.module, {**dict(enumerate(args)), **keyword_arguments()})
        if self._recorder.live and self._caches.takes():
            self._caches.root_begins(frame, {**dict(enumerate(args)), **keyword_arguments()})
        if self._recorder.live:
            self._logits.root_begins(frame)

    def _begin_step_of(self, module: nn.Module, place: Place) -> None:
        """Of an inference run: a call of a model is a step; weights have rows when they were written to."""
        recorder = self._recorder
        recorder.claim.model_begins(recorder.names.roots[place.root])
        if recorder.live:
            with self._weights as together:
                self._standing.record(module, together)

    def _root_mode(self, module: nn.Module, place: Place, recompute: bool) -> CallMode:
        """How a top-level call is recorded: training, no-grad inside training, evaluation (perhaps), or not at all."""
        if recompute:
            return CallMode("train", evaluating=False)
        root = self._recorder.names.roots[place.root]
        grad = torch.is_grad_enabled()
        delegated = not grad and inside_function()
        grad = grad or delegated
        # A loss module has no parameters and nobody calls its eval(): without gradients it serves an evaluation.
        evaluating = not static.is_training(module) or not (grad or root.parametric)
        if (evaluating and not grad and root.trained) or (STAGES in sys.modules and asks_for_shapes()):
            return _NOT_RECORDED
        if grad and not (evaluating or delegated):
            return _TRAINS
        return CallMode("train" if grad else "no_grad", evaluating=evaluating, delegated=delegated)

    def _autocast_is_new(self) -> bool:
        """Whether autocast is on, and the step does not know of it yet."""
        return self._recorder.current.autocast_dtype is None and torch._C._is_any_autocast_enabled()

    def _rest(self, module: nn.Module, frame: Frame) -> None:
        """Between samples: no hook inside this call, if it is a top-level one."""
        recorder = self._recorder
        if frame.module is not module or _in_recompute() != -1:
            return
        place, mode = frame.place, frame.mode
        if place is None or recorder.current.step == recorder.options.first_step:
            return  # nothing has been trained yet: the thread to be recorded may be another one
        if (key := (place.root, mode.name)) not in self._inner_autocast:
            self._inner_autocast[key] = None
            return
        if recorder.current.autocast_dtype is None:
            recorder.current.autocast_dtype = self._inner_autocast[key]
        self.module_hooks.rest_inside(module)

    def _note_autocast(self, mode: CallMode, outermost: Frame | None = None) -> None:
        """Note the dtype for the step; ``outermost`` is the top-level call that has entered autocast by itself."""
        for device in () if mode.evaluating else ("cuda", "cpu"):
            if torch.is_autocast_enabled(device):
                recorder, dtype = self._recorder, str(torch.get_autocast_dtype(device)).removeprefix("torch.")
                recorder.current.autocast_dtype = dtype
                if outermost is not None and outermost.place is not None:
                    self._inner_autocast[outermost.place.root, outermost.mode.name] = dtype
                if recorder.facts is not None:
                    recorder.facts.autocast(device, dtype)

    def _record_inputs(self, frame: Frame, given: dict[Any, Any]) -> None:
        recorder = self._recorder
        for name, x in tensor_leaves.floating(given, objects=frame.outermost):
            if self._seen.storage_of(x) or issubclass(type(x), nn.Parameter) or recorder.names.parameter(x) is not None:
                continue  # weights and buffers have rows of their own
            dense = tensor_leaves.plain(x)
            if dense is not None:
                kind = "batch" if frame.outermost and x.grad_fn is None else "input"
                recorder.measure(self._site(frame, kind, name, x), x, dense)
                self._seen.add(x)

    # --- leaving -----------------------------------------------------------------------------------------------------

    def _left(self, module: nn.Module, result: Any) -> None:
        stack: list[Frame] = getattr(self._recorder.local, "stack", [])
        for depth in range(len(stack) - 1, -1, -1):
            if stack[depth].module is module:
                break
        else:
            return  # entered before recording began
        frame = stack[depth]
        del stack[depth:]
        if not stack and self._window.is_open:
            self._window.leave_root(module, result)
        if not stack and self._logits.follows:
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
        if frame.kept is not None:
            self._scene.leave(frame.kept, result)
            frame.reopens = True
        if frame.reopens and self._loss_code.supported:
            self._loss_code.open()

    def _record_outputs(self, frame: Frame, result: Any) -> None:
        recorder = self._recorder
        recompute = _in_recompute() != -1
        for name, x in tensor_leaves.floating(result):
            if (self._last_hooked is not None and self._last_hooked() is x) if recompute else self._seen.tensor(x):
                continue  # a parent that returns its child's tensor adds nothing
            dense = tensor_leaves.plain(x)
            if dense is None:
                continue
            if not recompute:
                recorder.measure(self._site(frame, "output", name, x), x, dense)
                self._seen.add(x)
            if x.requires_grad and x.grad_fn is not None:
                self._last_hooked = weakref.ref(x)
                x.register_hook(functools.partial(self._came, self._site(frame, "grad_output", name, x)))

    def _gradient_came(self, site: Site, grad: Tensor | None) -> None:
        """The backward pass has reached an output."""
        recorder = self._recorder
        root = recorder.names.roots.get(site.place.root)
        if root is not None:
            root.trained = True
        if grad is None or not recorder.live or not recorder.in_backward:
            return  # compiled graphs hand over None for a gradient that does not exist
        own = recorder.site(site.place, site.kind, site.name, grad, call=site.call, evaluating=site.evaluating)
        entry = recorder.measure(own, grad)
        if entry is not None and site.evaluating:
            self._reached(entry)

    def _reached(self, entry: Entry) -> None:
        """An evaluation-mode forward took part in training after all: keep everything of its root."""
        for other in self._recorder.slots.evaluations():
            if other.site.place.root == entry.site.place.root and other.site.phase == "train":
                other.reached_by_backward = True

    # --- shared ------------------------------------------------------------------------------------------------------

    def _site(self, frame: Frame, kind: str, name: str, x: Tensor) -> Site:
        assert frame.place is not None
        mode = frame.mode
        return self._recorder.site(
            frame.place, kind, name, x, call=frame.call, phase=mode.phase, evaluating=mode.evaluating
        )


_NOT_RECORDED = CallMode("", evaluating=False)
#: From a hook to the call that it is run for.
_NEAR = 16
_TRAINS = CallMode("train", evaluating=False)
