"""The recorded operands of each module's matrix products: weight, input and output gradient."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from precdoctor.diagnosis.offline.whatif.gather import Seen
from precdoctor.diagnosis.survey.rows import text

if TYPE_CHECKING:
    from precdoctor.runlog.reader import Run

_FORWARD = ("batch", "input", "output")
_ROUTER = re.compile(r"(^|[._])(router|gate|gating)$")


@dataclass(frozen=True)
class Operands:
    """A module with a weight matrix, and its operands.

    Attributes:
        weight: its largest weight; a tied weight is recorded under another module.
        input: its own ``input`` row, or else the output of another module that is passed on to it; None if unknown.
        grad_output: None if not recorded.
        keep: why the module should stay wide whatever its numbers say; empty for most.
    """

    root: str
    module: str
    module_class: str
    weight: Seen
    input: Seen | None
    grad_output: Seen | None
    keep: str = ""

    @property
    def recorded(self) -> tuple[tuple[str, Seen], ...]:
        """Role and tensor of each recorded operand."""
        roles = (("weight", self.weight), ("input", self.input), ("grad_output", self.grad_output))
        return tuple((role, seen) for role, seen in roles if seen is not None)


def _tied_modules(run: Run) -> dict[tuple[str, str], tuple[str, str]]:
    """Return ``{module with a tied weight: module under which it is recorded}``, each as root and FQN."""
    found = {}
    for root in (root for rank in run.ranks for root in rank.facts.get("roots") or ()):
        for parameter in root.get("parameters") or ():
            for name in parameter.get("tied") or ():
                module = text(name).rpartition(".")[0]
                found[text(root.get("name")), module] = (text(root.get("name")), text(parameter.get("module")))
    return found


def modules_with_operands(tensors: Sequence[Seen], run: Run) -> list[Operands]:
    """Return every module with a weight matrix, in execution order; modules without a recorded output come last.

    Modules with a tied weight are left out without a recorded output.
    """
    weights: dict[tuple[str, str], Seen] = {}
    for s in tensors:
        place = (s.key.root, s.key.module)
        if s.key.kind == "weight" and s.is_matrix and (place not in weights or s.numel > weights[place].numel):
            weights[place] = s
    outputs = {(s.key.root, s.key.module): s for s in tensors if s.key.kind == "output"}
    grads = {(s.key.root, s.key.module): s for s in tensors if s.key.kind == "grad_output"}
    forward = [s for s in tensors if s.key.kind in _FORWARD and s.place[3] is not None]
    for place, owner in _tied_modules(run).items():
        if place in outputs and owner in weights:
            weights.setdefault(place, weights[owner])
    called = {(root, outer) for root, module in weights if (root, module) in outputs for outer in _outer(module)}
    found = []
    for place, weight in weights.items():
        output = outputs.get(place)
        module_class = weight.module_class if weight.key.module == place[1] or output is None else output.module_class
        source = _input_of(place, weight, output, forward, set(weights))
        keep = _role(place[1], module_class) or ("around other modules" if place in called else "")
        found.append(Operands(*place, module_class, weight, source, grads.get(place), keep))
    ordered = sorted(found, key=lambda m: _order(outputs.get((m.root, m.module))))
    return _with_heads(ordered, outputs)


def _outer(module: str) -> list[str]:
    """Return the FQNs of the modules around one: what is cast for them, their parts would be given already cast."""
    parts = module.split(".")
    return [".".join(parts[:n]) for n in range(len(parts))]


def _role(module: str, module_class: str) -> str:
    """Return why a module stays wide: ``embedding`` or ``router``; empty for all others.

    Source: DeepSeek-V3, arXiv:2412.19437, section 3.3.1.
    """
    if "Embedding" in module_class:
        return "embedding"
    return "router" if _ROUTER.search(module) else ""


def _with_heads(modules: Sequence[Operands], outputs: dict[tuple[str, str], Seen]) -> list[Operands]:
    """Mark the last module of each root in execution order, which makes the logits, to stay wide."""
    last: dict[str, str] = {m.root: m.module for m in modules if (m.root, m.module) in outputs and not m.keep}
    return [replace(m, keep="final logits") if last.get(m.root) == m.module and not m.keep else m for m in modules]


def _order(output: Seen | None) -> tuple[bool, tuple[int, int, int], int]:
    if output is None or output.place[3] is None:
        return True, (0, 0, 0), 0
    return False, output.place[:3], output.place[3]


def _input_of(
    place: tuple[str, str],
    weight: Seen,
    output: Seen | None,
    forward: Sequence[Seen],
    multiplying: set[tuple[str, str]],
) -> Seen | None:
    """Return the module's own input row, or else the nearest tensor before its output with the right feature count.

    Outputs of modules with weight matrices are taken only without another candidate: three projections of one tensor
    run one after the other, and none of them reads the output of the one before.
    """
    root = place[0]
    own = [s for s in forward if s.key.kind == "input" and (s.key.root, s.key.module) == place]
    if own:
        return max(own, key=lambda s: s.numel)
    if output is None or output.place[3] is None or len(weight.shape) < 2:
        return None
    order, features = output.place[3], weight.shape[1]
    axis = 1 if len(weight.shape) > 2 else -1  # convolutions have channels second
    fits = [
        s
        for s in forward
        if s.place[:3] == output.place[:3]
        and (s.place[3] or 0) < order
        and s.key.root == root
        and len(s.shape) > 1
        and s.shape[axis] == features
    ]
    first = [s for s in fits if s.key.kind != "output" or (s.key.root, s.key.module) not in multiplying]
    return max(first or fits, key=lambda s: s.place[3] or 0, default=None)
