"""Decides which steps are shadowed, has their root calls compared, and logs the result as events.

It runs where the guard does: the gradients are there, and the optimizer has not touched the weights. Training waits for
it and goes on from the same state; its time is charged neither to the step nor to the recorder.
"""

from __future__ import annotations

from typing import Any

import torch

from precdoctor.recording.model import static
from precdoctor.recording.model.module_names import unwrap
from precdoctor.recording.ops.source_lines import line_columns
from precdoctor.recording.ops.tensor_facts import dtype_name
from precdoctor.recording.process import attach
from precdoctor.recording.recorder.step_context import StepContext
from precdoctor.recording.scene.root_call import RootCall
from precdoctor.recording.scene.state_restore import Attributes, RandomState
from precdoctor.recording.scene.step_snapshot import Scene
from precdoctor.recording.shadowing.comparison import Compared, compare
from precdoctor.recording.shadowing.wide_replay import RefusedError

#: The formats that ``--reference`` can name.
REFERENCES = {"fp32": torch.float32, "fp64": torch.float64}
#: Maximum number of root calls compared per step: rollouts and decoding loops make many.
_MAX_CALLS = 8


class Shadow:
    """Compares chosen steps of rank 0 with a wide reference."""

    def __init__(self, context: StepContext, scene: Scene) -> None:
        self._context = context
        self._scene = scene
        self._wide = REFERENCES[context.options.shadow or "fp32"]
        #: Number of step attempts so far, per optimizer.
        self._attempts: dict[str, int] = {}
        self._count = 0
        scene.unlimited_at = self._may_be_due
        context.when_forked.append(self._attempts.clear)

    def _wants(self, step: int, attempt: int) -> bool:
        """Return whether to compare a step: named ones, else every N-th attempt, else attempts 0, 1, 4, 16, 64 ...

        On rank 0 and within ``shadow_steps`` only; attempts are counted per optimizer.
        """
        options = self._context.options
        first, last = options.shadow_steps
        if attach.global_rank() != 0 or step < (first or 0) or (last is not None and step >= last):
            return False
        if options.shadow_at:
            return step in options.shadow_at
        if options.shadow_every is not None:
            return attempt % options.shadow_every == 0
        return attempt == 0 or (attempt & (attempt - 1) == 0 and attempt.bit_length() % 2 == 1)

    def _may_be_due(self, step: int) -> bool:
        """Return whether the step that begins may be compared; the optimizer that will end it is not known yet."""
        return any(self._wants(step, n) for n in self._attempts.values() or (0,))

    def step_begins(self, optimizer: str, *, closure: bool, finite: bool) -> None:
        """Compare the step if it is due: an optimizer is about to step.

        Args:
            closure: whether the gradients are computed inside the optimizer's step.
            finite: whether loss and gradients are finite.
        """
        step, attempt = self._context.step, self._attempts.get(optimizer, 0)
        self._attempts[optimizer] = attempt + 1
        if not self._wants(step, attempt):
            return
        with self._context.off_the_clock():
            if closure:
                why: str | None = "the optimizer is given a closure: gradients come into being inside its step"
            elif not finite:
                why = "its loss or gradients are not finite: precdoctor diagnose says why"
            elif not self._scene.calls:
                why = self._scene.refused or "no module was called in it with gradients on"
            else:
                why = self._scene.why_not_now()
            if why is None:
                self._compare(self._scene.calls)
            else:
                self._log(None, {"outcome": "refused", "why": why})

    def _compare(self, calls: list[RootCall]) -> None:
        """Compare the root calls of the first micro-step."""
        mine = [c for c in calls if c.micro_step == calls[0].micro_step]
        modules = list({id(m): m for c in mine for m in static.modules(unwrap(c.module))}.values())
        random, attributes = RandomState.now(), Attributes(modules)
        left_out = max(0, len(mine) - _MAX_CALLS)
        try:
            for call in mine[:_MAX_CALLS]:
                self._compare_call(call, left_out)
        finally:
            random.restore()
            attributes.restore()

    def _compare_call(self, call: RootCall, left_out: int) -> None:
        try:
            done = compare(call, self._context.names, self._wide)
        except RefusedError as refusal:
            self._log(call, {"outcome": "refused", "why": str(refusal)})
        except Exception as error:  # noqa: BLE001 - the user's forward may refuse to run again, or memory may end
            attach.let_through(error)
            self._log(call, {"outcome": "failed", "why": attach.sentence(error)})
        else:
            self._log_layers(call, done, left_out)

    def _log_layers(self, call: RootCall, done: Compared, left_out: int) -> None:
        """Log the comparison of a root call, one event per layer."""
        data: dict[str, Any] = {
            "outcome": "compared" if done.layers else "nothing-reduced",
            "formats": sorted(done.formats),
            "reproduced": done.outputs > 0 and done.equal == done.outputs,
            "backward": done.backward,
            "same_draws": done.same_draws,
            "changed_arguments": call.changed,
            "calls_left_out": left_out,
        }
        number = self._log(call, data)
        for layer in done.layers:
            if layer.points:
                self._context.event(
                    "scan",
                    id=f"{number}.{layer.order}",
                    parent_id=number,
                    root=call.root,
                    module=layer.module,
                    micro_step=call.micro_step,
                    data=layer.as_dict(),
                )

    def _log(self, call: RootCall | None, data: dict[str, Any]) -> str:
        """Log a ``scan`` event about the step or a root call; return its number."""
        number = f"{attach.global_rank()}-s{self._count}"
        self._count += 1
        where: dict[str, Any] = {}
        if call is not None:
            where = {"root": call.root, "micro_step": call.micro_step, **line_columns(call.line)}
        about = {"what": "shadow", "reference": dtype_name(self._wide)}
        self._context.event("scan", id=number, **where, data={**about, **data})
        return number
