"""The tracer around training itself, for what no replay reaches: loss code, optimizers, code between modules.

Armed for a few steps only (``autopsy``, ``--arm-next``). The mode stays open over the user's code from the end of one
optimizer-step attempt to the end of the next; before the first step it opens as soon as torch is there. Results are
those of the run, which it does not change, only slows.
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

#: What a step can go wrong in, in the order it does.
_LOSS, _GRADIENTS, _WEIGHTS = "loss", "gradients", "weights"
_PHASES = {_LOSS: "forward", _GRADIENTS: "backward", _WEIGHTS: "optimizer"}


#: Ops remembered while no model has been called: data may be prepared for hours.
_WINDOW = 50_000


class LiveTrace:
    """Traces the steps in ``[first, last)`` until one has gone wrong.

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
        #: The trace has seen the weights being made.
        self._early = False
        #: The code before the step's first model is in the trace.
        self._before_model = False
        context.when_forked.append(self._drop)

    # --- the step ----------------------------------------------------------------------------------------------------

    def begin_early(self) -> None:
        """No model has been called since torch is there: the data of the first step may be made before the first call.

        Not in a process that unpickles its work: it loads data for another one.
        """
        if not self._context.options.inference and not getattr(current_process(), "_inheriting", False):
            self.begin_if_due()
        if self._tracer is not None:
            self._early, self._tracer.window = True, _WINDOW

    def _drop(self) -> None:
        """In a forked child, what is open is the parent's."""
        tracer, self._tracer = self._tracer, None
        if tracer is not None:
            retire(tracer)

    def begin_if_due(self) -> None:
        """A step begins, or its first top-level module is called."""
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
        """The attempt has ended, or (``died``) the run has, inside it.

        Args:
            died: nobody judged what was made.
            answered: nobody will: the step is a call of a model in an inference run, and the model has returned.
        """
        tracer, self._tracer = self._tracer, None
        if tracer is None:
            return
        retire(tracer)
        self._early = False
        for handle in self._handles:
            handle.remove()
        if (died or answered) and not self._bad:
            self._bad_at_last(tracer)
        if not self._report(tracer):
            self.over = self.over or self._context.step + 1 >= self._last
        elif not died:
            self._found()

    def _is_bad(self, x: Tensor) -> bool:
        with kernels.apart_from_every_mode():
            return bool(badness(x.detach()))

    def _note_known(self, tracer: Tracer) -> None:
        names = self._context.names
        for root in list(names.roots.values()):
            module = root.module()
            if module is None:
                continue
            for kind, tensors in (
                ("weight", static.parameters(module)),
                ("buffer", static.buffers(module)),
            ):
                for x in tensors:
                    if (found := names.parameter(x)) is not None:
                        if self._early and not self._is_bad(x):
                            tracer.forget(x)  # how a sound weight was made is of no interest
                        full = ".".join(filter(None, (found[0].module, found[1])))
                        tracer.note(x, External(kind, full))

    def root_called(self, module: nn.Module, root: str, arguments: Any) -> None:
        """A top-level module is called with these; what the trace has not seen being made is the batch."""
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
                    self._tracer.forget(x)  # in memory that another tensor had
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

    # --- what is wrong -----------------------------------------------------------------------------------------------

    def look_at(self, kind: str, tensors: Iterable[tuple[str, Tensor | None]]) -> None:
        """Loss (as backward begins), gradients (as the optimizer is given them) or weights (after it)."""
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
        """The run died of it before anybody called ``backward``: the last bad result is as far as it got."""
        last = next((r for r in reversed(tracer.records) if r.bad_out), None)
        if last is not None:
            self._bad[_LOSS] = [("", last.bad_out, (last.index,))]

    def _report(self, tracer: Tracer) -> bool:
        """Whether the step went wrong; then its events are logged."""
        kind = next((k for k in (_LOSS, _GRADIENTS, _WEIGHTS) if k in self._bad), None)
        if kind is None:
            return False
        self.over = True
        context, found = self._context, slice_back(tracer.records, [source for _, _, source in self._bad[kind]])
        traced = Replay(None, tracer, bad_outputs=self._bad[kind], micro_step=self._micro_step)
        outcome = "origin" if found is not None else "outside"
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
        """Whether the mode is open."""
        return self._tracer is not None
