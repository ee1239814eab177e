"""Finds losses that go into ``backward`` without the scale of the scaler that unscales their gradients.

A backward pass is *scaled* if its root is a result of ``scale``, or is computed from one: autograd numbers its nodes in
the order of their calls, so only nodes made after such a result need a look.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor

from precdoctor.recording import kernels
from precdoctor.recording.model import static, tensor_leaves
from precdoctor.recording.process import attach
from precdoctor.recording.recorder.step_context import StepContext
from precdoctor.recording.slots.deferred import defer

#: Most losses remembered between two steps of a scaler, and most results of ``scale`` between two of its updates.
_MAX_GIVEN = 64
#: Most nodes searched for a result of ``scale``, on other steps and on sampled ones; each takes about 1 us.
_MAX_NODES, _MAX_MEASURED = 64, 1 << 11
#: Number of nodes behind the root in which a factor is looked for by which the script scales the loss itself, and the
#: smallest such factor.
_FACTORS, _SCALE = 4, 16.0
PRODUCT: Final = "MulBackward0"
#: File and line of a ``backward`` call.
Line = tuple[str | None, int | None]


@dataclass
class MixedPasses:
    """The backward passes that added to the gradients of one optimizer since they were zeroed, by kind.

    Attributes:
        scaled, unscaled: number of passes that changed the watched gradient.
        early: numbers of all unscaled micro-steps, whatever gradients they changed.
        unknown: whether the kind of one pass is unknown.
        done: whether the scaler has unscaled these gradients: what is added later should be unscaled.
        steps, of: attempts by a scaler with passes of both kinds, and all of which the kinds are known.
    """

    scaled: int = 0
    unscaled: int = 0
    early: set[int] = field(default_factory=set)
    unknown: bool = False
    done: bool = False
    steps: int = 0
    of: int = 0
    line: Line = (None, None)

    def forget(self) -> None:
        """Forget the passes: the gradients were zeroed or written to."""
        self.scaled = self.unscaled = 0
        self.early.clear()
        self.unknown = False

    def pass_ended(self, losses: ScaledLosses, micro_step: int, *, changed: bool) -> None:
        """Count a pass; ``changed``: whether it changed the watched gradient.

        A loss that was given to ``scale`` is of unknown kind here: its scaled result may have its own pass.
        """
        if self.done:
            return
        scaled = None if losses.pass_is_given else losses.pass_is_scaled
        if scaled is False:
            self.early.add(micro_step)
        if changed:
            self.scaled += scaled is True
            self.unscaled += scaled is False
            self.unknown = self.unknown or scaled is None

    def stepped(self, losses: ScaledLosses, *, others: bool | None) -> bool:
        """Count an attempt by a scaler. Return whether it is the first one with gradients of both kinds of passes.

        ``others``: whether gradients other than the watched one come from an unscaled pass; None if unknown.
        """
        if not self.scaled:
            return False
        mixed = self.unscaled > 0 or others is True
        self.of += mixed or not (self.unknown or others is None)
        self.steps += mixed
        if mixed and self.steps == 1:
            self.line = losses.unscaled_line
        return mixed and self.steps == 1

    def data(self, optimizer: str) -> dict[str, Any]:
        """Return the data of a warning event."""
        return {
            "message": f"a scaler unscales gradients of {optimizer} to which a loss without its scale has added",
            "what": "mixed-scale",
            "optimizer": optimizer,
            "steps": self.steps,
            "of": self.of,
        }


class ScaledLosses:
    """Counts a scaler's steps whose backward passes all started from a loss given to ``scale``, not from its result.

    Attributes:
        in_use: whether ``scale`` was ever called.
        passes: backward passes since the last step.
        pass_is_scaled: whether the root of the last backward pass carries the scale of a scaler; None if unknown.
        pass_is_given: whether the root was itself given to ``scale``.
        unscaled_line: of the last pass that was seen to begin without a scale.
    """

    def __init__(self, context: StepContext) -> None:
        self._context = context
        context.when_forked.append(self._forget)
        self._forget()

    def _forget(self) -> None:
        self._given: list[weakref.ref[Tensor]] = []
        #: Results of ``scale`` since their scaler's last update: id of the scaler, number of the node, the tensor.
        self._results: deque[tuple[int, int, weakref.ref[Tensor]]] = deque(maxlen=_MAX_GIVEN)
        self.in_use = False
        self.pass_is_scaled: bool | None = None
        self.pass_is_given = False
        self.unscaled_line: Line = None, None
        #: How many of ``passes`` started from an unscaled loss.
        self.passes = self._unscaled = 0
        self._attempts = self._steps = 0
        #: File and line of the ``backward`` call in the first such step.
        self._line: Line = None, None

    def given(self, scaler: object, losses: Any, results: Any) -> None:
        """Remember the losses that ``scale`` was given, and what it returned."""
        self.in_use = True
        if len(self._given) < _MAX_GIVEN:
            self._given += [weakref.ref(x) for _, x in tensor_leaves.tensors(losses)]
        for _, x in tensor_leaves.tensors(results):
            if x.grad_fn is not None:
                self._results.append((id(scaler), x.grad_fn._sequence_nr(), weakref.ref(x)))

    def updated(self, scaler: object) -> None:
        """Forget what the scaler's ``scale`` returned: its scale may have changed."""
        if self._results:
            others = [result for result in self._results if result[0] != id(scaler)]
            self._results = deque(others, maxlen=_MAX_GIVEN)

    def backward_begins(self, roots: list[Any], gradients: Any) -> None:
        """Once a scaler is in use, note whether a pass begins at a loss given to ``scale``, and whether scaled."""
        judged = len(roots) == 1 and gradients is None
        self.pass_is_scaled = self._is_scaled(roots[0]) if judged else None
        self.pass_is_given = False
        if self._given:
            given = [known for x in self._given if (known := x()) is not None]
            self.pass_is_given = bool(roots) and all(any(root is x for x in given) for root in roots)
            self._unscaled += self.pass_is_given

    def _is_scaled(self, root: Tensor) -> bool | None:
        """Return whether a root is computed from a result of ``scale``; None if unknown."""
        results, node = self._results, root.grad_fn
        if node is None:
            return None
        if not results:  # the script calls ``scale`` later in this step, if at all
            return None if _is_multiplied(root) else False
        if any(root is result() for _, _, result in reversed(results)):
            return True
        numbers = {number for _, number, _ in results}
        first = min(numbers)
        if node._sequence_nr() < first and len(results) == _MAX_GIVEN:
            return None
        waiting, met = [node], {node}
        most = _MAX_MEASURED if self._context.live else _MAX_NODES
        while waiting:
            if (node := waiting.pop())._sequence_nr() in numbers:
                return True
            behind = {n for n, _ in node.next_functions if n is not None and first <= n._sequence_nr() < _NO_NUMBER}
            waiting += behind - met
            met |= behind
            if len(met) > most:
                return None
        return None if _is_multiplied(root) else False

    def stepped(self) -> None:
        """At the end of a scaler's ``step``, skipped or not, count it; report the first with unscaled losses only."""
        if not self.passes:
            return  # a step of another optimizer after the same passes
        unscaled = self._unscaled == self.passes
        self._attempts += 1
        self._steps += unscaled
        self._given.clear()
        self.passes = self._unscaled = 0
        if unscaled and self._steps == 1:
            facts = self._context.current
            self._line = facts.backward_file, facts.backward_line
            self._report()

    def run_ends(self) -> None:
        if self._steps > 1:
            self._report()

    def _report(self) -> None:
        data = {
            "message": "a scaler unscales gradients of losses that went into backward without its scale",
            "what": "scale-unused",
            "steps": self._steps,
            "of": self._attempts,
        }
        self._context.event("warning", file=self._line[0], line=self._line[1], data=data)


#: Sequence numbers from here on are those of leaves.
_NO_NUMBER: Final = 1 << 62


def constant_factor(root: Tensor) -> float | None:
    """Return the constant that a loss was last multiplied by (``loss * 65536``).

    None if there is no such factor, or reading it would wait for a device.
    """
    node = root.grad_fn
    return _factor(node)[1] if node is not None and node.name() == PRODUCT else None


def given_factor(gradients: Any) -> float | None:
    """Return the number that a backward pass begins with instead of 1 (``loss.backward(torch.tensor(65536.0))``).

    None if there is none, or reading it would wait for a device.
    """
    given = static.tensors(gradients)
    if len(given) != 1 or type(given[0]) is not Tensor or not given[0].is_cpu or given[0].numel() != 1:
        return None
    factor = defer(given[0])
    return factor if isinstance(factor, float) and factor != 1.0 else None


def _factor(node: Any) -> tuple[bool, float | None]:
    """Return whether a product has one factor without a gradient, and the factor; None if it is on a device."""
    for attribute in ("_saved_other", "_saved_self"):
        operand = getattr(node, attribute, None)
        if isinstance(operand, Tensor) and operand.numel() == 1 and not operand.requires_grad:
            with kernels.apart_from_user_modes():  # torch gives a mode a bare number instead of this tensor
                return True, float(operand) if operand.is_cpu else None
    return False, None


def _is_multiplied(root: Tensor) -> bool:
    """Return whether the script may have scaled a loss by itself: with a factor on a device, or of at least 16."""
    node = root.grad_fn
    for _ in range(_FACTORS):
        if node is None:
            return False
        if node.name() == PRODUCT:
            try:
                found, factor = _factor(node)
            except RuntimeError as error:  # an earlier pass has freed it
                attach.let_through(error)
                return True
            if found and (factor is None or abs(factor) >= _SCALE):
                return True
        node = next((n for n, _ in node.next_functions if n is not None), None)
    return False
