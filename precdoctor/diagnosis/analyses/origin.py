"""Separates the producer of a non-finite value from its propagators.

The rows of one step of one process are in execution order. The origin is the first non-finite row that is neither an
intended ``-inf`` mask nor non-finite in the same way on healthy steps. Everything before it is finite, so the code
between the last healthy tensor and the origin is the producer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from precdoctor.diagnosis.claims.finding import Phase
from precdoctor.diagnosis.survey.rows import FORWARD_KINDS, Key, TensorRow

#: Containers whose own ``forward`` computes nothing: code between their children runs in the module above.
_CONTAINERS = ("ModuleList", "ModuleDict", "Sequential")
#: Words in the names of modules that read masks: such a module turns a mask, not an overflow, into NaN.
_MASK_CONSUMERS = ("softmax", "attention", "attn")

#: Binades below the maximum: after an overflow the largest finite values lie within them, because values that grow from
#: step to step fill the last binade before some leave it.
NEAR_LIMIT = 1.0

ModuleClasses = Mapping[tuple[str, str], str]


@dataclass(frozen=True)
class Sighting:
    """A tensor on one healthy step: its kinds of non-finite values, share of ``-inf``, amax and headroom in binades."""

    step: int
    badness: frozenset[str]
    neg_inf_share: float
    amax: float | None
    headroom: float | None


#: Sightings per tensor over the healthy reference steps, in order of step.
Reference = Mapping[Key, Sequence[Sighting]]


@dataclass(frozen=True)
class Origin:
    """The code that made the first non-finite value of a step."""

    row: TensorRow
    phase: Phase
    root: str
    module: str
    module_class: str
    #: Where the code is: module | functional | own-code | between-roots | data | loss | loss-backward | reduction.
    how: str
    #: The last finite tensor before ``row``. In the backward pass, for ``own-code`` ``row`` itself, and for
    #: ``functional`` the next tensor of the forward pass.
    after: TensorRow | None
    masks: tuple[TensorRow, ...] = field(default=())

    @property
    def maker(self) -> str:
        """The producer, in words."""
        name = f"`{self.module or self.root}`" + (f" ({self.module_class})" if self.module_class else "")
        after = f"`{self.after.place}`" if self.after is not None else "its arguments"
        if self.how == "functional":
            return f"functional code in {name}, between {after} and `{self.row.place}`"
        if self.how == "own-code":
            return f"the code of {name} itself, after its submodule {after}"
        if self.how == "loss-backward":
            return "the backward pass of the loss code"
        if self.how == "between-roots":
            return f"the code between {after} and {name}"
        return name


def is_loss_module(root: str, module: str, module_class: str) -> bool:
    """Return whether a module's class name is that of a loss (``CrossEntropyLoss``, ``SetCriterion`` ...)."""
    return (
        (module_class or (root.split("#", maxsplit=1)[0] if not module else "")).lower().endswith(("loss", "criterion"))
    )


def class_of(classes: ModuleClasses, root: str, module: str, known: str = "") -> str:
    """Return the class of a module: ``known`` from its row, else from the module tree; empty if unknown."""
    return known or classes.get((root, module), "") or ("" if module else root.split("#", maxsplit=1)[0])


def caller_of(root: str, module: str, previous: TensorRow | None, classes: ModuleClasses) -> str:
    """Return the FQN of the module whose code called ``module``: its nearest ancestor that is no container.

    If ``previous``, the tensor made just before, is known and of the same root, the ancestor also contains that one.
    """
    parts = module.split(".")[:-1] if module else []
    if previous is not None and previous.root == root:
        others = previous.module.split(".") if previous.module else []
        parts = [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(parts, others, strict=False))]
    while parts and class_of(classes, root, ".".join(parts)) in _CONTAINERS:
        parts = parts[:-1]
    return ".".join(parts)


def suspicious(
    rows: Sequence[TensorRow], reference: Reference, *, loss_is_finite: bool
) -> tuple[TensorRow | None, tuple[TensorRow, ...]]:
    """Return the first row by position that is non-finite without excuse (None without any), and the masks before it.

    A row is excused if it is non-finite in the same way on a healthy step. A row that holds nothing but ``-inf`` is
    also excused if the loss is finite, or if :func:`_is_mask`. Unless the loss is finite, a mask in which finite values
    have also overflowed is not excused.
    """
    bad = sorted((r for r in rows if r.bad), key=lambda r: r.position)
    masks: list[TensorRow] = []
    for i, row in enumerate(bad):
        seen = reference.get(row.key, ())
        if not loss_is_finite and overflowed_mask(row, seen):
            return row, tuple(masks)
        usual = row.badness <= frozenset().union(*(s.badness for s in seen))
        if not usual and not (row.mask_like and (loss_is_finite or _is_mask(row, bad[i + 1 :], known=bool(seen)))):
            return row, tuple(masks)
        if row.mask_like:
            masks.append(row)
    return None, tuple(masks)


def overflowed_mask(row: TensorRow, seen: Sequence[Sighting]) -> bool:
    """Return whether some ``-inf`` of a masked tensor are overflowed values: logits below the format's range.

    Then the share of ``-inf`` is larger than on any healthy step, and the largest finite values are near the limit. A
    mask filled with the format's lowest finite number has many elements exactly at the maximum, and is not reported.
    """
    if not row.mask_like or row.headroom is None or row.headroom >= NEAR_LIMIT or row.at_max > row.neg_inf:
        return False
    return all(row.neg_inf / row.numel > s.neg_inf_share for s in seen)


def _is_mask(mask: TensorRow, later: Sequence[TensorRow], *, known: bool) -> bool:
    """Return whether a row that holds only ``-inf`` is a mask, by the first of ``later`` that has NaN or ``+inf``.

    False without such a row, or if it is the loss. ``known``: the tensor was seen on healthy steps, without ``-inf``;
    then a new ``-inf`` is a mask only if softmax or attention reads it.
    """
    worse = next((r for r in later if not r.mask_like), None)
    if worse is None or worse.kind == "loss":
        return False
    consumer = f"{worse.module_class} {worse.module} {mask.module_class} {mask.module}".lower()
    return not known or any(word in consumer for word in _MASK_CONSUMERS)


def last_healthy(rows: Iterable[TensorRow], before: TensorRow, kinds: Sequence[str]) -> TensorRow | None:
    """Return the last finite row of these kinds executed before ``before``; masks count as finite. None without one."""
    chosen = [r for r in rows if r.kind in kinds and r.order is not None and (not r.bad or r.mask_like)]
    earlier = [r for r in chosen if before.order is not None and (r.order or 0) < before.order]
    return max(earlier, key=lambda r: r.order or 0, default=None)


def locate_forward(
    row: TensorRow, rows: Sequence[TensorRow], masks: tuple[TensorRow, ...], classes: ModuleClasses
) -> Origin:
    """Return the origin, given the first non-finite row of a forward pass: a batch, input, output or loss."""
    after = last_healthy(rows, row, FORWARD_KINDS)
    module_class = class_of(classes, row.root, row.module, row.module_class)
    if row.kind == "loss":
        return Origin(row, Phase.LOSS, row.root, row.module, "", "loss", after, masks)
    if row.kind == "batch":
        return Origin(row, Phase.DATA, row.root, row.module, module_class, "data", after, masks)
    if row.kind == "input" and not row.module:  # a root's argument with a graph behind it: made after another root
        phase = Phase.LOSS if is_loss_module(row.root, "", module_class) else Phase.FORWARD
        return Origin(row, phase, row.root, row.module, module_class, "between-roots", after, masks)
    if row.kind == "input":
        caller = caller_of(row.root, row.module, after, classes)
        name = class_of(classes, row.root, caller)
        phase = Phase.LOSS if is_loss_module(row.root, caller, name) else Phase.FORWARD
        return Origin(row, phase, row.root, caller, name, "functional", after, masks)
    if is_loss_module(row.root, row.module, module_class):
        return Origin(row, Phase.LOSS, row.root, row.module, module_class, "module", after, masks)
    inside = (
        after is not None and after.root == row.root and is_below(after.module, row.module) and after.kind == "output"
    )
    how = "own-code" if inside else "module"
    return Origin(row, Phase.FORWARD, row.root, row.module, module_class, how, after, masks)


def is_below(module: str, ancestor: str) -> bool:
    """Return whether ``module`` is inside ``ancestor``; both are FQNs, and the root's is empty."""
    return module != ancestor and (not ancestor or module.startswith(ancestor + "."))


def locate_backward(row: TensorRow, rows: Sequence[TensorRow], classes: ModuleClasses) -> Origin:
    """Return the origin, given the first non-finite gradient: the backward pass of what read its tensor in forward."""
    after = last_healthy(rows, row, ("loss", "grad_output", "weight_grad"))
    own_class = class_of(classes, row.root, row.module, row.module_class)
    if row.kind != "grad_output":
        how = "reduction" if row.kind == "weight_grad_step" else "module"
        return Origin(row, Phase.BACKWARD, row.root, row.module, own_class, how, after)
    consumer = _consumer(row, rows)
    if consumer is None:
        return Origin(row, Phase.BACKWARD, row.root, row.module, own_class, "loss-backward", after)
    name = class_of(classes, consumer.root, consumer.module, consumer.module_class)
    if consumer.root != row.root or (consumer.kind == "output" and not is_below(row.module, consumer.module)):
        return Origin(row, Phase.BACKWARD, consumer.root, consumer.module, name, "module", after)
    if consumer.kind == "output":  # the parent's own code after its last child
        return Origin(row, Phase.BACKWARD, consumer.root, consumer.module, name, "own-code", row)
    caller = caller_of(row.root, consumer.module, row, classes)
    name = class_of(classes, row.root, caller)
    return Origin(row, Phase.BACKWARD, row.root, caller, name, "functional", consumer)


def _consumer(row: TensorRow, rows: Sequence[TensorRow]) -> TensorRow | None:
    """Return the forward row right after the output whose gradient is ``row``; None if unknown or read by the loss."""
    own = next((r for r in rows if r.kind == "output" and r.key[:2] == row.key[:2] and r.key[3:] == row.key[3:]), None)
    if own is None or own.order is None:
        return None
    later = [r for r in rows if r.kind in FORWARD_KINDS and r.order is not None and r.order > own.order]
    return min(later, key=lambda r: r.order or 0, default=None)
