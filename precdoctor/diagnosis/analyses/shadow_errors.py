"""Errors of pieces of code against a wide reference, as ``precdoctor shadow`` measured them, and their limits.

Errors are relative L2 errors. Their unit u is half an ulp at 1 (2^-8 for BF16): rounding a tensor once to nearest gives
0.4 u, a healthy layer less than 1 u; 4 u is the first limit. Element-wise limits would fail every healthy run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from precdoctor.diagnosis.survey.rows import grouped, integer, known_format, number, text
from precdoctor.diagnosis.survey.view import RunView, remembered
from precdoctor.numerics.formats import FP32, Format

#: Compared tensors, in the order in which a step makes them.
KINDS = ("input", "output", "grad_output", "grad_input", "weight_grad")
FORWARD = ("input", "output")
#: A layer of a chain: ``blocks.3``.
_LAYER = re.compile(r"((?:.*\.)?)\d+")
_DONE = ("compared", "nothing-reduced")


@dataclass(frozen=True)
class Piece:
    """The errors of one kind of tensor that a piece of code makes, on the step with the largest own error.

    Attributes:
        module: the module whose code it is: the caller, if the tensor is an ``input`` or ``grad_output`` of ``beside``.
        beside: the module right after (``input``) or before (``grad_output``) the code; None for a module's own code.
        kind: one of :data:`KINDS`.
        order: execution order of the module at which the tensor was compared.
        local: the piece's own error, made on exact inputs; None if only the accumulated error is known.
        accumulated: error of the reduced run at this tensor.
        given: error of the reduced run in the piece's inputs.
    """

    root: str
    module: str
    module_class: str
    beside: str | None
    kind: str
    name: str
    dtype: str
    step: int
    order: int
    local: float | None
    accumulated: float | None
    given: float | None
    #: Step of the accumulated error; ``step`` is that of the local one.
    accumulated_step: int = 0

    @property
    def place(self) -> str:
        """``blocks.0.attn``, or ``blocks.0.attn before .proj`` for code between modules."""
        own = self.module or self.root
        if self.beside is None:
            return own
        beside = self.beside.removeprefix(self.module) if self.module else f".{self.beside}"
        return f"{own} {'before' if self.kind == 'input' else 'behind'} {beside}"

    @property
    def amplification(self) -> float:
        """Accumulated error over the larger of the inputs' and the own error, infinite if both are 0.

        0 if unknown, and in the backward pass.
        """
        if self.accumulated is None or self.given is None or self.kind not in FORWARD:
            return 0.0
        base = max(self.given, self.local or 0.0)
        return self.accumulated / base if base > 0.0 else math.inf if self.accumulated > 0.0 else 0.0


@dataclass(frozen=True)
class Shadowed:
    """All comparisons of a run.

    Attributes:
        reference: dtype of the reference.
        fmt: the narrowest format in which any op computed; None if no step was compared.
        steps: compared steps.
        pieces: the pieces of code, one per kind of tensor.
        refused: steps that could not be compared, with the reason.
        exact: whether every replay reproduced the run's outputs bit for bit.
        without_backward: steps whose gradients were not compared because some overflowed.
        notes: sentences for a reader.
        nothing_reduced: steps on which nothing was narrower than the reference.
        roots: the compared top-level modules.
    """

    reference: str
    fmt: Format | None
    steps: tuple[int, ...]
    pieces: tuple[Piece, ...]
    refused: tuple[tuple[int, str], ...] = ()
    exact: bool = True
    without_backward: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    nothing_reduced: tuple[int, ...] = ()
    roots: tuple[str, ...] = ()

    @property
    def dtype(self) -> str:
        """The dtype of :attr:`fmt`; empty if that is None."""
        return self.fmt.dtype if self.fmt is not None else ""

    @property
    def u(self) -> float:
        """Half an ulp at 1 of :attr:`fmt`; 0 if that is None."""
        return unit(self.fmt) if self.fmt is not None else 0.0

    @property
    def slack(self) -> float:
        """Factor on the limits: 16 in FP32, whose sums are accumulated in FP32, so that 4096 terms err by 64 u."""
        return 16.0 if self.fmt is not None and self.fmt.mantissa_bits >= FP32.mantissa_bits else 1.0

    def worst(self) -> list[Piece]:
        """Return the pieces with a known own error, largest first."""
        return sorted((p for p in self.pieces if p.local is not None), key=lambda p: (-(p.local or 0.0), p.order))

    def layers(self) -> dict[tuple[str, str], float]:
        """Return ``{(root, module): largest own error}`` by root, then in order of execution."""
        found: dict[tuple[str, str], float] = {}
        for p in sorted(self.pieces, key=lambda p: (p.root, p.order)):
            if p.local is not None:
                found[p.root, p.module] = max(found.get((p.root, p.module), 0.0), p.local)
        return found

    def along_depth(self, root: str, kind: str = "output") -> list[tuple[str, float]]:
        """Return module and accumulated error along the depth of a root; for gradients, from the loss on.

        The line consists of the longest chain of numbered layers (``blocks.0``, ``blocks.1`` ...) and the modules after
        it; of all modules if no chain has three layers. An ``input`` or ``grad_output`` counts for the module it is of.
        """
        mine = [p for p in self.pieces if p.root == root and p.accumulated is not None and p.kind == kind]
        mine.sort(key=lambda p: p.order)
        place = {p: p.module if p.beside is None else p.beside for p in mine}
        chains = grouped((match[1], module) for module in place.values() if (match := _LAYER.fullmatch(module)))
        chain = max(chains.values(), key=lambda names: (len(names), -names[0].count(".")), default=[])
        if len(chain) >= 3:
            last = max(p.order for p in mine if place[p] == chain[-1])
            inside = tuple(f"{name}." for name in chain)
            mine = [p for p in mine if place[p] in chain or (p.order > last and not place[p].startswith(inside))]
        line = [(place[p], p.accumulated or 0.0) for p in mine]
        return line if kind == "output" else line[::-1]


@dataclass(frozen=True)
class Limits:
    """Limits of a finding; see the options of PD704 for units and sources."""

    expected: float = 4.0
    limit: float = 8.0
    bits: float = 3.0
    amplification: float = 8.0

    def off(self, p: Piece, found: Shadowed) -> bool:
        """Return whether the piece's own error is above the limit."""
        return p.local is not None and p.local > self.limit * found.slack * found.u

    def above_expectation(self, error: float | None, found: Shadowed) -> bool:
        """Return whether an error is larger than a healthy piece makes."""
        return error is not None and error > self.expected * found.slack * found.u

    def amplifies(self, p: Piece) -> bool:
        """Return whether the piece enlarges errors by at least ``amplification`` and leaves at most ``bits`` bits."""
        left = p.accumulated is not None and p.accumulated >= 2.0**-self.bits
        return left and p.amplification >= self.amplification

    def guilty(self, found: Shadowed) -> list[Piece]:
        """Return the pieces to report: forward pieces with a large own error, pieces that amplify, backward pieces.

        Backward pieces come last: errors of the forward pass make the backward pass wrong as well.
        """
        own = [p for p in found.worst() if self.off(p, found)]
        more = sorted((p for p in found.pieces if p not in own and self.amplifies(p)), key=lambda p: p.order)
        forward = [p for p in own if p.kind in FORWARD]
        return [*forward, *more, *(p for p in own if p.kind not in FORWARD)]


def unit(fmt: Format) -> float:
    """Return half an ulp at 1: 2^-8 for BF16, 2^-11 for FP16, 2^-24 for FP32."""
    return float(2.0 ** -(fmt.mantissa_bits + 1))


@remembered
def shadowed(view: RunView) -> Shadowed | None:
    """Return the comparisons of a run; None if it has none. Computed once per view."""
    events = view.events_of("scan")
    calls = {text(e.get("id")): e for e in events if e["data"].get("what") == "shadow"}
    if not calls:
        return None
    of = {name: [e for e in calls.values() if text(e["data"].get("outcome")) == name] for name in _DONE}
    rest = [e for e in calls.values() if text(e["data"].get("outcome")) not in _DONE]
    done = of["compared"]
    layers = [e for e in events if e["data"].get("what") == "layer" and text(e.get("parent_id")) in calls]
    pieces = _worst_steps(p for e in layers for p in _pieces(e, view.module_classes))
    return Shadowed(
        reference=text(next(iter(calls.values()))["data"].get("reference")),
        fmt=next(iter(_formats(done)), None),
        steps=_steps(done),
        pieces=tuple(pieces),
        refused=tuple((integer(e.get("step")) or 0, text(e["data"].get("why"))) for e in rest),
        exact=all(e["data"].get("reproduced") is True for e in done),
        without_backward=_steps(e for e in done if e["data"].get("backward") == "overflowed"),
        notes=tuple(_notes(done)),
        nothing_reduced=_steps(of["nothing-reduced"]),
        roots=tuple(dict.fromkeys(text(e.get("root")) for e in done)),
    )


def _steps(events: Any) -> tuple[int, ...]:
    return tuple(sorted({integer(e.get("step")) or 0 for e in events}))


def _formats(calls: Sequence[Mapping[str, Any]]) -> list[Format]:
    """Return the formats in which ops computed, the narrowest first."""
    names = {text(name) for e in calls for name in e["data"].get("formats") or ()}
    formats = {fmt.name: fmt for name in names if (fmt := known_format(name)) is not None}
    return sorted(formats.values(), key=lambda f: (f.mantissa_bits, f.name))


def _notes(calls: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if any(e["data"].get("same_draws") is False for e in calls):
        yield "random numbers (dropout masks) of the reference differ from the run's; errors include that difference"
    reduced = [f.name for f in _formats(calls) if f.mantissa_bits < FP32.mantissa_bits]
    if len(reduced) > 1:
        yield f"ops compute in {', '.join(reduced)}; all are judged by the first, the narrowest"
    if changed := sorted({text(n) for e in calls for n in e["data"].get("changed_arguments") or ()}):
        yield f"arguments were written to before the comparison: {', '.join(changed[:4])}"
    if left_out := max((integer(e["data"].get("calls_left_out")) or 0 for e in calls), default=0):
        yield f"{left_out} further calls of top-level modules in a step were not compared"


def _pieces(event: Mapping[str, Any], classes: Mapping[tuple[str, str], str]) -> Iterator[Piece]:
    """Yield the pieces of one ``layer`` event: one per compared kind of tensor."""
    data, root, module = event["data"], text(event.get("root")), text(event.get("module"))
    for kind in KINDS:
        point = data.get(kind)
        if not isinstance(point, Mapping):
            continue
        around = kind in ("input", "grad_output")
        parent = data.get("parent")
        if around and parent is None:
            continue  # code before and after a root is not replayed
        owner = text(parent) if around else module
        yield Piece(
            root=root,
            module=owner,
            module_class=classes.get((root, owner), "" if around else text(data.get("class"))),
            beside=module if around else None,
            kind=kind,
            name=text(point.get("name")),
            dtype=text(point.get("dtype")),
            step=integer(event.get("step")) or 0,
            order=integer(data.get("order")) or 0,
            local=_error(point.get("local")),
            accumulated=_error(point.get("accumulated")),
            given=_error(point.get("given")),
            accumulated_step=integer(event.get("step")) or 0,
        )


def _error(value: Any) -> float | None:
    """Convert a number of an event, in which infinity is the string ``"Infinity"``; None if missing or NaN."""
    return math.inf if value == "Infinity" else number(value)


def _worst_steps(pieces: Iterator[Piece]) -> list[Piece]:
    """Reduce to one entry per piece: the step with its largest own error, with the largest accumulated error of any."""
    worst: dict[tuple[str, str, str | None, str], Piece] = {}
    for p in pieces:
        key = (p.root, p.module, p.beside, p.kind)
        known = worst.setdefault(key, p)
        larger, other = (p, known) if (p.local or 0.0) > (known.local or 0.0) else (known, p)
        if (other.accumulated or 0.0) > (larger.accumulated or 0.0):
            larger = replace(
                larger, accumulated=other.accumulated, given=other.given, accumulated_step=other.accumulated_step
            )
        worst[key] = larger
    return sorted(worst.values(), key=lambda p: (p.root, p.order, KINDS.index(p.kind)))
