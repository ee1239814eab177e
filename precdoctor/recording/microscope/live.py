"""Traces training itself for what no replay reaches: loss code, optimizers, code between modules.

Armed for a few steps only (``autopsy``, ``--arm-next``). The mode stays open over the user's code from the end of one
step attempt to the end of the next; for the first step it opens as soon as torch is imported. It slows the run but does
not change its results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from multiprocessing.process import current_process
from typing import Any

import torch
from torch import Tensor, nn

from precdoctor.recording import kernels
from precdoctor.recording.microscope.event_rows import incident_event, op_events
from precdoctor.recording.microscope.examination import Examination
from precdoctor.recording.microscope.replay import Replay
from precdoctor.recording.microscope.slicing import slice_back
from precdoctor.recording.microscope.tracer import External, Source, Tracer
from precdoctor.recording.model import static, tensor_leaves
from precdoctor.recording.ops.dispatched_ops import in_backward, put_on, retire, will_come_back
from precdoctor.recording.ops.tensor_facts import badness
from precdoctor.recording.recorder.step_context import StepContext

#: What can go wrong in a step, in the order of its phases.
_LOSS, _GRADIENTS, _WEIGHTS = "loss", "gradients", "weights"
_PHASES = {_LOSS: "forward", _GRADIENTS: "backward", _WEIGHTS: "optimizer"}


#: Maximum number of ops remembered before the first call of a model: data may be prepared for hours.
_WINDOW = 50_000


class LiveTrace:
    """Traces the steps in ``[first, last)`` until one goes wrong.

    Args:
        found: called when a step has gone wrong, after its events were logged.
    """

    def __init__(self, context: StepContext, steps: tuple[int, int], found: Callable[[], None]) -> None:
        self._context = context
        self._first, self._last = steps
        self._found = found
        self._tracer: Tracer | None = None
        self._bad: dict[str, list[tuple[str, int, Source]]] = {}
        self._handles: list[Any] = []
        self._micro_step = 0
        self.over = False
        #: Whether the trace began early enough to see the weights being made.
        self._is_early = False
        #: Whether the trace includes the code before the step's first call of a model.
        self._before_model = False
        context.when_forked.append(self._drop)

    # --- the step ----------------------------------------------------------------------------------------------------

    def begin_early(self) -> None:
        """Begin as soon as torch is imported: the first step's data may be made before any model is called.

        Not in a process that unpickles its work, such as a data loader's worker.
        """
        if not self._context.options.inference and not getattr(current_process(), "_inheriting", False):
            self.begin_if_due()
        if self._tracer is not None:
            self._is_early, self._tracer.window = True, _WINDOW

    def _drop(self) -> None:
        """Close the trace in a forked child: it is the parent's."""
        tracer, self._tracer = self._tracer, None
        if tracer is not None:
            retire(tracer)

    def begin_if_due(self) -> None:
        """Begin to trace if the step is within the range and is not traced yet."""
        due = not self.over and self._first <= self._context.step < self._last
        # A call of a model in an inference run is over before the inference mode that it runs in.
        wait = in_backward() if self._context.options.inference else will_come_back()
        if self._tracer is None and due and not wait:
            values = not self._context.options.redact_names
            self._tracer = Tracer({}, values=values)
            self._tracer.live = True
            self._bad = {}
            self._before_model = True
            self._note_known(self._tracer)
            place = nn.modules.module
            self._handles = [
                place.register_module_forward_pre_hook(self._entered),
                place.register_module_forward_hook(self._left, always_call=True),
            ]
            put_on(self._tracer)

    def end(self, *, died: bool = False, answered: bool = False) -> None:
        """End the trace of a step attempt; log its events if the step went wrong.

        Args:
            died: the run has died inside the step, before its values were judged.
            answered: the step is a call of a model in an inference run, which has returned: nothing else judges its
                values.
        """
        tracer, self._tracer = self._tracer, None
        if tracer is None:
            return
        retire(tracer)
        self._is_early = False
        for handle in self._handles:
            handle.remove()
        if (died or answered) and not self._bad:
            self._bad_at_last(tracer)
        if not self._report(tracer):
            self.over = self.over or self._context.step + 1 >= self._last
        elif not died:
            self._found()

    def _is_bad(self, x: Tensor) -> bool:
        """Return whether a tensor holds a non-finite value, without the trace seeing the check."""
        with kernels.apart_from_every_mode():
            return bool(badness(x.detach()))

    def _note_known(self, tracer: Tracer) -> None:
        """Note which tensors are weights and buffers."""
        names = self._context.names
        for _, module in names.models():
            for kind, tensors in (("weight", static.parameters(module)), ("buffer", static.buffers(module))):
                for x in tensors:
                    if (name := names.full_name(x)) is not None:
                        if self._is_early and not self._is_bad(x):
                            tracer.forget(x)  # a finite weight: the ops that made it do not matter
                        tracer.note(x, External(kind, name))

    def root_called(self, module: nn.Module, root: str, arguments: Any) -> None:
        """Note a root call; argument tensors whose making the trace has not seen are the batch."""
        late = self._tracer is None
        self.begin_if_due()
        if self._tracer is not None:
            if late:  # torch has already chosen the hooks of this call
                self._before_model = False
                self._entered(module, ())
            self._tracer.window = None
            self._note_known(self._tracer)
            self._tracer.root = root
            for name, x in tensor_leaves.tensors(arguments, objects=True):
                if self._is_bad(x) and not self._tracer.made_bad(x):
                    self._tracer.forget(x)  # not made by ops of the trace: they wrote to this memory for another tensor
                self._tracer.note(x, External("batch", name))

    def _entered(self, module: nn.Module, _args: Any) -> None:
        tracer = self._tracer
        if tracer is None or torch.compiler.is_compiling():
            return
        place = self._context.names.find(module)
        above = tracer.modules[-1] if tracer.modules else ""
        if place is not None and not tracer.modules:
            tracer.root = place.root
        tracer.modules.append(place.module if place is not None else f"{above}.{type(module).__name__}".lstrip("."))

    def _left(self, _module: nn.Module, _args: Any, _result: Any) -> None:
        tracer = self._tracer
        if tracer is not None and tracer.modules and not torch.compiler.is_compiling():
            tracer.modules.pop()
            if not tracer.modules:
                tracer.root = None

    # --- bad values --------------------------------------------------------------------------------------------------

    def look_at(self, kind: str, tensors: Iterable[tuple[str, Tensor | None]]) -> None:
        """Note the bad tensors of a ``kind`` (loss, gradients, weights), unless some were noted in this step."""
        tracer = self._tracer
        if tracer is None:
            return
        found = []
        for name, x in tensors:
            dense = tensor_leaves.plain(x) if x is not None else None
            if dense is not None and x is not None and (bad := badness(dense.detach())):
                found.append((name, bad, tracer.source(x)))
        if found and kind not in self._bad:
            self._bad[kind] = found
            self._micro_step = self._context.micro_step

    def _bad_at_last(self, tracer: Tracer) -> None:
        """Take the last bad result for a bad loss: the run died before ``backward`` was called."""
        if (last := next((r for r in reversed(tracer.records) if r.bad_out), None)) is not None:
            self._bad[_LOSS] = [("", last.bad_out, (last.index,))]

    def _report(self, tracer: Tracer) -> bool:
        """Log the events of a step that went wrong; return whether it did."""
        kind = next((k for k in (_LOSS, _GRADIENTS, _WEIGHTS) if k in self._bad), None)
        if kind is None:
            return False
        self.over = True
        context, found = self._context, slice_back(tracer.records, [source for _, _, source in self._bad[kind]])
        traced = Replay(None, tracer, bad_outputs=self._bad[kind], micro_step=self._micro_step)
        outcome = "origin" if found.path else "outside"
        done = Examination(outcome, _PHASES[kind], found=traced, slice=found, live=True)
        number = f"live-{context.step}"
        weight = self._bad[_WEIGHTS][0][0] if kind == _WEIGHTS else None  # the first that the optimizer spoilt
        facts = {"policy": "trace", "live": True, "before_model": self._before_model, "weight": weight}
        row = incident_event(done, number, facts)
        row["root"] = (done.origin.root or "") if done.origin is not None else ""
        context.event("incident", **row)
        for op in op_events(done, number):
            context.event("op", **op)
        return True

    @property
    def running(self) -> bool:
        return self._tracer is not None
