"""Examines one incident: finds the root call or loss code to replay; a second replay collects the facts."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from torch import Size

from precdoctor.recording.microscope.loss_replay import replay_loss, restore_lost_gradients
from precdoctor.recording.microscope.replay import Alone, Replay, replay
from precdoctor.recording.microscope.slicing import Slice
from precdoctor.recording.microscope.tracer import OpRecord
from precdoctor.recording.model import static
from precdoctor.recording.model.module_names import Names, unwrap
from precdoctor.recording.ops.op_facts import Spot, Wanted
from precdoctor.recording.ops.tensor_facts import NAN, NEG_INF, POS_INF, badness, describe
from precdoctor.recording.process import attach
from precdoctor.recording.scene.root_call import RootCall
from precdoctor.recording.scene.state_restore import Attributes, RandomState, attributes_aside, no_anomalies
from precdoctor.recording.scene.step_snapshot import Scene

#: Maximum number of arguments of a root call that are reported.
_MAX_ARGUMENTS = 8


@dataclass
class Examination:
    """The outcome of an examination.

    Attributes:
        outcome: ``origin`` (ops follow), ``outside`` (the code between or after the root calls made it),
            ``not-reproduced`` (finite when replayed from the same state), ``refused`` or ``failed``.
        phase: of the origin: forward, backward or optimizer.
    """

    outcome: str
    phase: str | None = None
    why: str | None = None
    found: Replay | None = None
    slice: Slice = field(default_factory=Slice)
    changed_arguments: list[str] = field(default_factory=list)
    #: Facts of the floating-point arguments of the call in which the origin lies.
    batch: list[dict[str, Any]] = field(default_factory=list)
    changed_attributes: tuple[str, ...] = ()
    #: Whether the run itself was traced, so that nothing had to be reproduced.
    live: bool = False

    @property
    def reproduced(self) -> str | None:
        """``bit-for-bit``, ``in-kind`` or ``not-reproduced``; None if nothing was replayed."""
        if self.found is None:
            return None
        if self.live:
            return "bit-for-bit"
        if self.outcome == "not-reproduced":
            return self.outcome
        return "bit-for-bit" if self.found.compared and self.found.equal == self.found.compared else "in-kind"

    @property
    def origin(self) -> OpRecord | None:
        """The first op that made something non-finite of finite operands; None if there is none."""
        if self.found is None or not self.slice.origins:
            return None
        return self.found.tracer.records[self.slice.origins[0]]

    @property
    def first_harmful(self) -> OpRecord | None:
        """The first origin whose result is no mask, else :attr:`origin`, or None if a bad weight or batch was read too.

        A model makes its mask first, and a mask that meets something worse has done no harm.
        """
        if self.found is None:
            return None
        origins = (self.found.tracer.records[i] for i in self.slice.origins)
        return next((o for o in origins if not _may_be_a_mask(o)), None if self.slice.externals else self.origin)


def _may_be_a_mask(record: OpRecord) -> bool:
    """Return whether an op's result holds ``-inf`` only, and would in FP64: it is no overflow."""
    reference = record.facts.get("reference")
    overflowed = reference is not None and not any(reference[kind] for kind in ("nan", "pos_inf", "neg_inf"))
    return record.bad_out == NEG_INF and not overflowed


@no_anomalies()
def examine(
    scene: Scene, names: Names, look_at: str, *, values: bool, calls: list[RootCall] | None = None, alone: bool = False
) -> Examination:
    """Replay the step's root calls until one shows the bad value; restore the state of the process.

    Args:
        look_at: where the bad value is: ``outputs`` (of forward passes), ``gradients``, or ``buffers`` (written
            forward).
        values: whether facts may hold single values.
        calls: for ``outputs``: replay only these calls; None: all.
        alone: whether no other rank replays its step now.
    """
    if (refused := scene.why_not_now()) is not None:
        return Examination("refused", why=refused)
    modules = list({id(m): m for c in scene.calls for m in static.modules(unwrap(c.module))}.values())
    owners = list({id(o): o for c in scene.calls for o in c.owners}.values())
    random, changed = RandomState.now(), tuple[str, ...]()
    forward = functools.partial(_forward, calls=calls)
    looks: dict[str, Callable[..., Examination]] = {"outputs": forward, "gradients": _backward, "buffers": _buffers}
    try:
        instances = [o for o in owners if type(o) is not SimpleNamespace]  # that is no object of the user's
        with attributes_aside([*modules, *instances]), Alone() if alone else contextlib.nullcontext():
            attributes = Attributes([*modules, *owners])
            try:
                done = looks[look_at](scene, names, values=values)
            finally:
                changed = attributes.restore()
    except Exception as error:  # noqa: BLE001 - the user's own forward may refuse to run twice
        attach.let_through(error)
        done = Examination("failed", why=attach.sentence(error))
    finally:
        random.restore()
    done.changed_attributes = changed
    if done.found is not None and done.found.call is not None:
        given = [(n, x) for n, x, _ in done.found.call.versions if x.is_floating_point()]
        done.batch = [{"argument": name, **describe(x.detach())} for name, x in given[:_MAX_ARGUMENTS]]
    done.changed_arguments = sorted({name for c in scene.calls for name in c.changed})
    return done


def _forward(scene: Scene, names: Names, *, values: bool, calls: list[RootCall] | None = None) -> Examination:
    """Find the first root call, code between root calls, or loss code that makes a non-finite value going forward.

    ``calls``: search these root calls only.
    """
    masked: Replay | None = None
    for call in _relevant_first(scene.calls) if calls is None else calls:
        done = replay(call, names, values=values)
        if done.bad_outputs and (not _given_bad_argument(done) or (_is_filled(masked) and _spoils_mask(done))):
            if any(kinds != NEG_INF for _, kinds, _ in done.bad_outputs) or _has_overflowed(done):
                return _with_facts("forward", done)
            masked = masked or done  # -inf may be a mask (forbidden tokens): later code decides
        elif done.bad_outputs and (between := _forward_between(call, values=values)) is not None:
            return between
        if done.missing:
            why = f"output {done.missing[0] or 'of the call'} was not finite in the run and is when run again"
            return Examination("not-reproduced", "forward", why=why, found=done)
    reason = "every top-level module's outputs are finite"
    done_loss = _loss_code(scene, "forward", reason, values=values)
    if done_loss.origin is None or done_loss.origin.line is None:  # no line: a node of a double backward pass
        done_loss = _grad_calls(scene, names, values=values) or done_loss
    if masked is None or _made_worse(done_loss, NAN | POS_INF if _is_filled(masked) else NAN):
        return done_loss
    return _with_facts("forward", masked)


def _forward_between(call: RootCall, *, values: bool) -> Examination | None:
    """Examine the code between two top-level modules, if it made an argument of the second one bad; else None."""
    for graph in call.graphs:
        if badness(graph.value):
            done = replay_loss(graph, backward=False, before=call, values=values)
            if done.bad_outputs:
                return _with_facts("forward", done)
    return None


def _made_worse(done: Examination, kinds: int) -> bool:
    """Return whether the loss code has turned a ``-inf`` into values of these kinds."""
    return done.found is not None and done.slice.made_worse(done.found.tracer.records, kinds)


def _is_filled(masked: Replay | None) -> bool:
    """Return whether a module has returned ``-inf`` that its code filled in; not the result of a ``log``, say."""
    return masked is not None and masked.slice().is_filled(masked.tracer.records)


def _has_overflowed(done: Replay) -> bool:
    """Return whether a ``-inf`` that a module returned comes from an overflow, and so is no mask."""
    return done.slice().overflowed(done.tracer.records)


def _relevant_first(calls: list[RootCall]) -> list[RootCall]:
    """Return the calls, first those that the backward pass went through or that no gradient could reach.

    The others, such as a sampler's or a penalty's calls of the model, may overflow without any effect on the loss.
    """
    found = [c for c in calls if c.gradients or c.lost or not c.makers]
    return [*found, *(c for c in calls if not any(c is f for f in found))]


def _buffers(scene: Scene, names: Names, *, values: bool) -> Examination:
    """Find the root call whose forward pass makes buffers non-finite."""
    for call in scene.calls:
        done = replay(call, names, buffers=True, values=values)
        if done.bad_buffers:
            return _with_facts("forward", done)
    return Examination("outside", "forward", why="no forward pass made the buffers non-finite")


def _given_bad_argument(done: Replay) -> bool:
    """Return whether a module was given a bad argument by the code between two top-level modules."""
    return any(e.kind == "argument" for e, _ in done.slice().externals)


def _spoils_mask(done: Replay) -> bool:
    """Return whether a module was given nothing worse than ``-inf``, and made worse of it."""
    found, records = done.slice(), done.tracer.records
    at = [(e, records[index]) for e, index in found.externals]
    read = (bad for e, op in at for source, bad in zip(op.sources, op.bad_in, strict=False) if source == e)
    return all(bad in (0, NEG_INF) for bad in read) and found.made_worse(records)


def _backward(scene: Scene, names: Names, *, values: bool) -> Examination:
    """Find the root call, code between root calls, or loss code that makes a gradient non-finite.

    In each micro-step the last call comes first in the backward pass.
    """
    if not scene.losses and any(t.graph is not None and badness(t.graph.value) for t in scene.grad_calls):
        return _forward(scene, names, values=values)  # no ``backward`` has shown a loss
    reason = "the backward pass of every top-level module is finite"
    given: Replay | None = None
    restore_lost_gradients(scene, values=values)
    for micro_step in sorted({c.micro_step for c in scene.calls}):
        for call in reversed([c for c in scene.calls if c.micro_step == micro_step]):
            if any(badness(g) for g in call.gradients.values()):
                reason = "the gradients of top-level modules' outputs are bad already"
                continue
            if call.lost:
                reason = "the gradients of its outputs exceed --scene-memory"
                continue
            done = replay(call, names, backward=True, values=values)
            if done.bad_gradients and not _only_inherits(done):
                return _with_facts("backward", done)
            if done.bad_gradients:
                given = given or done
                continue
            if (behind := _backward_between(call, done, values=values)) is not None:
                return behind
    found = _loss_code(scene, "backward", reason, values=values)
    if found.origin is not None:
        return found
    if (ignored := _ignored_outputs(scene, names, values=values)) is not None:
        return ignored
    if given is not None:
        return _with_facts("backward", given)
    return _grad_calls(scene, names, values=values) or found


def _only_inherits(done: Replay) -> bool:
    """Return whether a module's gradients are bad only because of a bad argument, made by other code."""
    return not done.slice().origins and _given_bad_argument(done)


def _ignored_outputs(scene: Scene, names: Names, *, values: bool) -> Examination | None:
    """Examine a forward pass whose bad outputs (padding) the loss ignores, but the gradient does not; else None."""
    for call in scene.calls:
        if call.gradients and any(x._version == v and badness(x) & ~NEG_INF for _, x, v in call.outputs):
            done = replay(call, names, values=values)
            if done.bad_outputs and not _given_bad_argument(done):
                return _with_facts("backward", done)
    return None


def _backward_between(call: RootCall, done: Replay, *, values: bool) -> Examination | None:
    """Examine the backward pass of code between two top-level modules, if it made a finite gradient bad; else None."""
    for graph in call.graphs:
        gradient = done.argument_gradients.get(graph.argument)
        if gradient is None or badness(gradient):
            continue
        first = replay_loss(replace(graph, gradient=gradient), backward=True, before=call, values=values)
        if first.bad_gradients and not first.bad_outputs:
            return _with_facts("backward", first)
    return None


def _grad_calls(scene: Scene, names: Names, *, values: bool) -> Examination | None:
    """Examine the first call of ``torch.autograd.grad`` that made something bad of finite values; else None."""
    for grad_call in scene.grad_calls:
        if grad_call.graph is not None and badness(grad_call.graph.value):
            continue
        if not grad_call.has_lost_results and not any(
            x is not None and badness(x.detach()) for r in grad_call.results for x in [r()]
        ):
            continue
        for call in reversed([c for c in scene.calls if grad_call.number in c.grad_call_gradients]):
            if not any(badness(g) for g in call.grad_call_gradients[grad_call.number].values()):
                done = replay(call, names, grad_call=grad_call, values=values)
                if done.bad_gradients:
                    return _with_facts("backward", done)
        if grad_call.graph is not None:
            done = replay_loss(grad_call.graph, backward=True, values=values)
            if done.bad_gradients and not done.bad_outputs:
                return _with_facts("backward", done)
    return None


def _loss_code(scene: Scene, phase: str, reason: str, *, values: bool) -> Examination:
    """Examine the code around the modules, as far as it is in autograd's graph: no module made the bad value."""
    graphs = scene.losses or [t.graph for t in scene.grad_calls if t.graph is not None]
    for graph in graphs if phase == "forward" else scene.losses:
        done = replay_loss(graph, backward=phase == "backward", values=values)
        if graph.cut and done.slice().path and not done.slice().origins:
            reason = "the loss code is too long: what it read first is not in the part that was kept"
        elif done.bad_outputs if phase == "forward" else done.bad_gradients:
            return _with_facts(phase, done)
    return Examination("outside", phase, why=reason)


def _with_facts(phase: str, first: Replay) -> Examination:
    """Replay a second time, for the facts of the ops around the origin."""
    found = first.slice()
    if not found.path or first.again is None:
        return Examination("outside", phase, why="no op of the replay made the bad value", found=first)
    second = first.again(Wanted(found.wanted, _spot(first, found)))
    same = second.slice()
    if (same.origins, same.externals, same.path) == (found.origins, found.externals, found.path):
        return Examination("origin", phase, found=second, slice=found)
    return Examination("origin", phase, found=first, slice=found)


def _spot(first: Replay, found: Slice) -> Spot | None:
    """Return index and shape of the first bad element of the first origin; None if unknown."""
    results = first.tracer.records[found.origins[0]].facts.get("results", ()) if found.origins else ()
    return next(((r["first_bad"], Size(r["shape"])) for r in results if "first_bad" in r), None)
