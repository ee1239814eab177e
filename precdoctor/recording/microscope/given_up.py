"""Examines steps that the script gives up: it has seen a non-finite loss, and skips the batch or ends.

No optimizer step follows, so the guard does not see them. Without a backward pass all that is kept is what the
top-level modules returned; it is read

- before the optimizer steps, if a call got no gradient and another one from the same line did (the loop has gone on
  with the next batch), or if there was no backward pass (a closure that returns without one);
- when the step has made more calls than are kept for a replay: the loop gives up every batch;
- when the script calls ``sys.exit``, or the process ends.

If all of that is finite, the loss is looked for among the variables of the user's code that is running: the script has
just read it there. At the end, the losses and gradients of a step with a backward pass are read too. If an exception
about NaN or infinities ends the script (``torch.multinomial`` and distributions refuse NaN), all tensors that autograd
has computed are read from the frames of its traceback, and a call or a backward pass that has raised is replayed.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Final

from torch import Tensor, nn

from precdoctor.recording import kernels
from precdoctor.recording.microscope.incidents import Incidents
from precdoctor.recording.model import static, tensor_leaves
from precdoctor.recording.model.module_names import class_name
from precdoctor.recording.ops.source_lines import Line, is_foreign
from precdoctor.recording.ops.tensor_facts import NEG_INF, badness
from precdoctor.recording.process import attach
from precdoctor.recording.process.attach import is_main_code
from precdoctor.recording.process.fatal_exception import calls_left, tells_of_nonfinite
from precdoctor.recording.recorder.hook_guard import guarded
from precdoctor.recording.recorder.step_context import StepContext
from precdoctor.recording.scene.loss_code import LossCode
from precdoctor.recording.scene.root_call import RootCall
from precdoctor.recording.scene.step_snapshot import Scene
from precdoctor.recording.slots.step_batch import looks_like_a_scale
from precdoctor.recording.steps.sentinel import amax, gradients_of, largest

#: Maximum number of calls whose outputs are read, the last ones of the step, and of frames that are searched.
_MAX_CALLS, _MAX_FRAMES = 16, 32
#: Whether the variables of a function can be read without keeping them alive until it returns: Python stores a copy of
#: them in the frame before 3.13.
_READS_FUNCTIONS: Final = sys.version_info >= (3, 13)
#: The function of torch's that every call of a module goes through.
_MODULE_CALL: Final = getattr(getattr(nn.Module, "_wrapped_call_impl", None), "__code__", None)


class GivenUp:
    """Reads what a step has left behind, and logs an incident if it is not finite; at most one per step.

    Args:
        found_bad: returns whether a step is an incident already.
        loss_is_bad: returns whether a loss of the current step is non-finite, and no loss scaler is the reason.
    """

    def __init__(
        self,
        context: StepContext,
        scene: Scene,
        loss_code: LossCode,
        incidents: Incidents,
        found_bad: Callable[[int], bool],
        loss_is_bad: Callable[..., bool],
    ) -> None:
        self._context, self._scene, self._loss_code, self._incidents = context, scene, loss_code, incidents
        self._found_bad, self._loss_is_bad = found_bad, loss_is_bad
        self._forget()
        context.when_forked.append(self._forget)
        guard = guarded(context)
        scene.when_full = guard(self._gives_up_all)
        context.when_closing.append(guard(self._run_ends))
        #: To be called as the script calls ``sys.exit``.
        self.leaves = guard(self._leaves)

    def _forget(self) -> None:
        self._last: int | None = None

    def step_begins(self, finite_before: Callable[[], dict[str, bool]]) -> None:
        """Read the calls that the loop has given up before this step, whose loss and gradients are finite.

        Called if the step has several calls, or no backward pass.

        Args:
            finite_before: returns whether the parts of a checkpoint were finite as the step began.
        """
        calls = without = self._without_gradients()
        if without and self._context.micro_step:
            trained = {(c.root, c.line) for c in self._scene.calls if c.has_gradient}
            calls = [c for c in without if (c.root, c.line) in trained]
        if calls:
            self._look(calls, [], "; the script goes on", finite_before)

    def _gives_up_all(self) -> None:
        """Read the calls of a step that makes too many."""
        self._look(self._without_gradients(), _running(sys._getframe(1), functions=_READS_FUNCTIONS), "")

    def _leaves(self, frame: FrameType) -> None:
        """Judge the step in progress as the script calls ``sys.exit``."""
        if self._context.state == "armed":
            self._judge_trained("; the script ends")
            self._look(self._without_gradients(), _running(frame), "; the script ends")

    def _run_ends(self) -> None:
        """Judge the step in progress as the log is closed."""
        end = "; the run has ended"
        self._judge_trained(end)
        is_about_nonfinite = tells_of_nonfinite()
        frames = [call.tb_frame for call in calls_left()[:_MAX_FRAMES]]
        variables = (x for f in frames for x in (_computed(_read(f)) if is_about_nonfinite else _variables(f)))
        main = static.own(sys.modules.get("__main__"))
        self._look(self._without_gradients(), itertools.chain(variables, _losses(main)), end)
        if self._is_over() or not is_about_nonfinite:
            return
        if any(c.tb_frame.f_code.co_name == "_engine_run_backward" for c in calls_left()):  # the user's anomaly mode
            self._examine("gradients", "a value in the backward pass", end)
            return
        raised = (c for c in reversed(self._scene.calls_in_progress) if not c.returned)
        if call := next(raised, None) or self._call_left():
            self._examine("outputs", "a value in a forward pass", end, calls=[call], is_certain=False)

    def _without_gradients(self) -> list[RootCall]:
        """Return the calls of the step in progress that autograd has recorded and no backward pass has reached yet."""
        return [c for c in self._scene.calls_in_progress if c.makers and not c.has_gradient]

    def _call_left(self) -> RootCall | None:
        """Keep the outermost module call that the exception has left, if any, and return it.

        A call without gradients, as in a rollout, is not kept as it begins; its autocast state is lost.
        """
        outwards = calls_left()
        for depth in reversed(range(len(outwards))):
            frame = outwards[depth].tb_frame
            if frame.f_code is _MODULE_CALL:
                module, args, kwargs = (frame.f_locals[name] for name in ("self", "args", "kwargs"))
                place = self._context.names.find(module)
                root = class_name(module) if place is None else place.root
                call = self._scene.enter(module, root, args, kwargs)
                users = (c for c in outwards[depth:] if not is_foreign(c.tb_frame.f_code.co_filename))
                if call is not None and (caller := next(users, None)) is not None:
                    call.line = Line(caller.tb_frame.f_code.co_filename, caller.tb_lineno)
                return call
        return None

    def _judge_trained(self, end: str) -> None:
        """Log an incident if the step has had a backward pass, and its loss or its gradients are not finite."""
        context = self._context
        if not context.micro_step or self._is_over():
            return
        scaled = context.current.loss_scale is not None or any(map(looks_like_a_scale, context.current.root_factors))
        weights = [p for call in self._scene.calls for p in static.parameters(call.module)]
        try:
            loss_bad = self._loss_is_bad(scaled=scaled)
            gradients_bad = not scaled and not math.isfinite(largest(amax(gradients_of(weights))))
        except RuntimeError as error:  # the device has failed: nothing can be read from it any more
            attach.let_through(error)
            return
        if loss_bad:
            self._examine("outputs", "the loss", end)
        elif gradients_bad:
            self._examine("gradients", "a gradient", end)

    def _look(
        self,
        calls: list[RootCall],
        variables: Iterable[Tensor],
        end: str,
        finite_before: Callable[[], dict[str, bool]] | None = None,
    ) -> None:
        """Log an incident if a call has returned something non-finite, or code behind it has made a loss that is."""
        if self._is_over() or not (calls or self._loss_code.awaits_backward):
            return
        with kernels.apart_from_user_modes():
            try:
                bad = _bad_ones(calls[-_MAX_CALLS:])
                loss = None if bad else next((x for x in variables if badness(x.detach()) & ~NEG_INF), None)
            except RuntimeError as error:  # the device has failed: nothing can be read from it any more
                attach.let_through(error)
                return
        if loss is not None and (graph := self._loss_code.graph_of(loss, None)) is not None:
            self._scene.losses.append(graph)
        elif not bad:
            return
        what = "the result of a forward pass" if bad else "a loss"
        more = {} if finite_before is None else {"finite_before": finite_before()}
        self._examine("outputs", f"{what} without a backward pass", end, more, calls=bad or calls)

    def _is_over(self) -> bool:
        """Return whether nothing is to be examined any more in this step."""
        context = self._context
        over = context.options.on_nonfinite == "observe" or context.traced
        return over or self._last == context.step or self._found_bad(context.step)

    def _examine(
        self,
        look_at: str,
        what: str,
        end: str,
        more: dict[str, Any] | None = None,
        *,
        calls: list[RootCall] | None = None,
        is_certain: bool = True,
    ) -> None:
        """Log an incident; the arguments are those of :meth:`Incidents.examine`."""
        context = self._context
        of_loss = look_at == "outputs"
        data: dict[str, Any] = {"policy": context.options.on_nonfinite, "given_up": True, "loss_is_bad": of_loss}
        data |= {"gradients_are_bad": not of_loss, "skips_in_a_row": 0, **(more or {})}
        if self._incidents.examine(look_at, what, data, end, calls=calls, alone=True, is_certain=is_certain):
            self._last, context.current.bad = context.step, True


def _bad_ones(calls: Sequence[RootCall]) -> list[RootCall]:
    """Return the calls that have returned a NaN or +Inf; -Inf alone is a mask. What was written to since is ignored."""
    returned = [[x for _, x, version in c.outputs if tensor_leaves.version(x) == version] for c in calls]
    if math.isfinite(largest(amax(itertools.chain.from_iterable(returned)))):
        return []
    kinds = [[badness(x) for x in tensor_leaves.all_plain(given)] for given in returned]
    return [call for call, found in zip(calls, kinds, strict=True) if any(kind & ~NEG_INF for kind in found)]


def _losses(variables: Mapping[str, Any]) -> Iterator[Tensor]:
    """Return the variables that may be losses: plain floating-point scalars that autograd has computed."""
    return (x for x in _computed(variables) if x.numel() == 1)


def _variables(frame: FrameType) -> Iterator[Tensor]:
    """Yield what may be a loss among the variables of a frame; nothing for code that is not the user's."""
    if not is_foreign(frame.f_code.co_filename) or is_main_code(frame):
        yield from _losses(_read(frame))


def _computed(variables: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the plain floating-point tensors that autograd has computed among the variables."""
    for x in list(variables.values()):
        if type(x) is Tensor and x.grad_fn is not None and x.is_floating_point():
            yield x


def _read(frame: FrameType) -> Mapping[str, Any]:
    """Return the variables of a frame; none if their namespace is a class of the user's."""
    variables = frame.f_locals
    is_known = type(variables) is dict or type(variables).__name__ == "FrameLocalsProxy"
    return variables if is_known else {}


def _running(frame: FrameType | None, *, functions: bool = True) -> Iterator[Tensor]:
    """Yield what may be a loss in a frame and its callers, innermost first.

    Args:
        functions: whether to search functions too, not only modules.
    """
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return
        if functions or frame.f_code.co_name == "<module>":
            yield from _variables(frame)
        frame = frame.f_back
