"""Which recorded tensors a module multiplies: its weight, what goes in, and the gradient of what comes out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from precdoctor.diagnosis.offline.whatif.gather import Seen
from precdoctor.diagnosis.survey.rows import text

_FORWARD = ("batch", "input", "output")
_EMBEDDING = re.compile(r"Embedding")
_ROUTER = re.compile(r"(^|[._])(router|gate|gating)$")


@dataclass(frozen=True)
class Operands:
    """A module with a weight of two dimensions or more.

    Attributes:
        weight: its (largest) weight; under the name of another module where the two are tied.
        input: what it is given: its own ``input`` row or, where another module's output is passed on, that output; None
            where neither can be told.
        grad_output: None where not recorded.
        keep: why it should stay wide whatever its numbers say; empty for most.
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
        """The operands there are, by role."""
        roles = (("weight", self.weight), ("input", self.input), ("grad_output", self.grad_output))
        return tuple((role, seen) for role, seen in roles if seen is not None)


def tied_modules(facts: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], tuple[str, str]]:
    """Root and module of those whose weight is recorded under another module's name, and that other one.

    Args:
        facts: ``rank.json`` of each rank.
    """
    found = {}
    for root in (root for rank in facts for root in rank.get("roots") or ()):
        for parameter in root.get("parameters") or ():
            for name in parameter.get("tied") or ():
                module = text(name).rpartition(".")[0]
                found[text(root.get("name")), module] = (text(root.get("name")), text(parameter.get("module")))
    return found


def modules_with_operands(
    seen: Iterable[Seen], tied: Mapping[tuple[str, str], tuple[str, str]] | None = None
) -> list[Operands]:
    """Every module that multiplies by a matrix, in execution order; those never seen running come last.

    Args:
        tied: as :func:`tied_modules` has it; such a module counts once it was seen running.
    """
    tensors = list(seen)
    weights: dict[tuple[str, str], Seen] = {}
    for s in tensors:
        place = (s.key.root, s.key.module)
        if (
            s.key.kind == "weight"
            and sum(n > 1 for n in s.shape) >= 2
            and (place not in weights or s.numel > weights[place].numel)
        ):
            weights[place] = s
    outputs = {(s.key.root, s.key.module): s for s in tensors if s.key.kind == "output"}
    grads = {(s.key.root, s.key.module): s for s in tensors if s.key.kind == "grad_output"}
    forward = [s for s in tensors if s.key.kind in _FORWARD and s.place[3] is not None]
    for place, owner in (tied or {}).items():
        if place in outputs and owner in weights:
            weights.setdefault(place, weights[owner])
    found = []
    for place, weight in weights.items():
        output = outputs.get(place)
        module_class = weight.module_class if weight.key.module == place[1] or output is None else output.module_class
        source = _input_of(place, weight, output, forward, set(weights))
        found.append(Operands(*place, module_class, weight, source, grads.get(place), _role(place[1], module_class)))
    ordered = sorted(found, key=lambda m: _order(outputs.get((m.root, m.module))))
    return _with_heads(ordered, outputs)


def _role(module: str, module_class: str) -> str:
    """Theory and practice agree on these, whatever one run shows (DeepSeek-V3, arXiv:2412.19437, section 3.3.1)."""
    if _EMBEDDING.search(module_class):
        return "embedding"
    return "router" if _ROUTER.search(module) else ""


def _with_heads(modules: Sequence[Operands], outputs: dict[tuple[str, str], Seen]) -> list[Operands]:
    """The last module of each root to run gives the logits."""
    from dataclasses import replace

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
    """The module's own input row; else the nearest tensor before its output that has as many features as it takes.

    Outputs of modules that multiply themselves come second: three projections of one normalised tensor run one after
    the other, and none of them takes the output of its neighbour.
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
