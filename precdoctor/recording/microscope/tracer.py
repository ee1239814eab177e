"""The op-level tracer: records every aten op of a forward and backward pass, which of them are bad, and their sources.

A record holds numbers and names only, never a tensor. Full facts (operand ranges, the FP64 result) are taken at once
for every op that turns finite operands into a non-finite result, because its operands exist only then.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from precdoctor.recording.microscope.writers import Writers
from precdoctor.recording.ops.dispatched_ops import (
    OVERWRITING,
    UNINITIALISED,
    Retiring,
    is_out_variant,
    op_name,
    sequence_number,
    storage_key,
    tensors_in,
    written_by,
)
from precdoctor.recording.ops.op_facts import Wanted, closer_look
from precdoctor.recording.ops.source_lines import Line, innermost_user_line
from precdoctor.recording.ops.tensor_facts import NAN, NEG_INF, POS_INF, badness

#: Maximum number of suspects for which facts are taken; a mask filled in each layer is one each.
_MAX_SUSPECTS = 256
#: Maximum number of ops recorded; a longer trace is cut and marked incomplete.
MAX_OPS = 400_000
#: The name of a node of torch's, with the suffix of the function that stands for it in a replay (``derivatives``).
_STANDS_FOR = re.compile(r"^(\w+Backward\d+)Backward$")


@dataclass(frozen=True)
class External:
    """A tensor from before the trace. ``kind`` is weight, computed (a weight that the step computed from others),
    buffer, batch, argument (made by code between two top-level modules), constant or unknown.
    """

    kind: str
    name: str = ""


#: Indices of the ops that wrote to a tensor's storage, or the tensor from before the trace that it is.
Source = tuple[int, ...] | External


@dataclass
class OpRecord:
    """One executed op."""

    index: int
    op: str
    #: forward | recompute | backward
    phase: str
    module: str | None
    line: Line | None
    sources: tuple[Source, ...]
    #: Badness of each floating-point operand; only filled in if the result is bad.
    bad_in: tuple[int, ...] = ()
    bad_out: int = 0
    #: For backward ops: the name of the autograd node, and the index of its forward op (None if written by hand).
    node: str | None = None
    forward: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    #: Name of the top-level module in which the op ran; None in a replay, which has only one.
    root: str | None = None

    @property
    def suspect(self) -> bool:
        """Whether the op made a non-finite result of finite operands."""
        return bool(self.bad_out) and not any(self.bad_in)

    def spoils_mask(self, kinds: int = NAN | POS_INF) -> bool:
        """Return whether the op made something of these kinds of nothing worse than a mask's ``-inf``."""
        return bool(self.bad_out & kinds) and any(self.bad_in) and all(b in (0, NEG_INF) for b in self.bad_in)


class Tracer(Retiring):
    """Records every op run while it is entered (see the module docstring).

    Args:
        known: weights, buffers and the batch, by :func:`storage_key`.
        wanted: ops whose full facts are wanted whatever they compute.
        values: whether facts may hold single operand values at the first bad element.
        writes_to: memory from before the trace, by :func:`storage_key`, that ops may write to; None: all. Any other
            write raises a RuntimeError.
    """

    def __init__(
        self,
        known: Mapping[int, External],
        wanted: Wanted | None = None,
        *,
        values: bool = True,
        writes_to: frozenset[int] | None = None,
    ) -> None:
        super().__init__()
        self.records: list[OpRecord] = []
        #: FQN of the modules whose forward is running, outermost first.
        self.modules: list[str] = []
        self.complete = True
        #: If set, the source line of all ops, in place of the line that runs.
        self.line: Line | None = None
        #: The source line of ops that no user code runs.
        self.fallback: Line | None = None
        #: Whether training itself is traced, not a replay.
        self.live = False
        #: If live: the running top-level module.
        self.root: str | None = None
        #: If live: number of ops after which the trace begins anew; None: it ends after :data:`MAX_OPS`.
        self.window: int | None = None
        self._known, self._writes_to = dict(known), writes_to
        self._wanted, self._spot = wanted or Wanted()
        self._values = values
        self._suspects = 0
        self._writers = Writers()
        self._made_by_sequence: dict[int, int | None] = {}

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.over:
            return func(*args, **kwargs)
        if self.window is not None and len(self.records) >= self.window:
            self._restart()
        if len(self.records) >= MAX_OPS:
            self.complete = False
            return func(*args, **kwargs)
        written = written_by(func, args, kwargs)
        if self._writes_to is not None and not all(storage_key(x) in self._writes_to or self.made(x) for x in written):
            raise RuntimeError("an op of a replay writes to memory of the run")
        operands = [x for x in tensors_in((args, kwargs)) if x.is_floating_point() or x.is_complex()]
        before = [x.clone() if any(x is w for w in written) else x for x in operands]
        sources = tuple(self.source(x) for x in operands)
        sequence = sequence_number()
        result = func(*args, **kwargs)
        record = self._record(func, sources)
        self._made_by_sequence.setdefault(sequence - 1, record.index)
        self._note_writes(record.index, operands, written, result)
        self._judge(record, func, args, kwargs, before, operands, written, result)
        return result

    # --- one op ------------------------------------------------------------------------------------------------------

    def _record(self, func: Any, sources: tuple[Source, ...]) -> OpRecord:
        index = len(self.records)
        node: Any = torch._C._current_autograd_node()
        line = self.line or innermost_user_line(past_own=self.live) or self.fallback
        module = self.modules[-1] if self.modules else None
        record = OpRecord(index, str(func), "forward", module, line, sources, root=self.root)
        if node is not None and module is not None:
            record.phase = "recompute"
        elif node is not None or torch._C._current_graph_task_id() != -1:
            record.phase = "backward"
            record.node = _STANDS_FOR.sub(r"\1", node.name()) if node is not None else None
            forward = self._made_by_sequence.get(node._sequence_nr()) if node is not None else None
            if forward is not None:
                made = self.records[forward]
                # The ops in the forward pass of a user's function have no derivative of their own.
                record.forward = forward if (record.node or "")[-1:].isdigit() else None
                record.module, record.root = made.module, made.root
                record.line = made.line if self.line is not None else line or made.line
        self.records.append(record)
        return record

    def _judge(
        self,
        record: OpRecord,
        func: Any,
        args: Any,
        kwargs: Any,
        before: list[Tensor],
        operands: list[Tensor],
        written: list[Tensor],
        result: Any,
    ) -> None:
        """Fill in which operands and results of an op are bad; take full facts if it may be the origin."""
        name = op_name(func)
        if name in UNINITIALISED:
            return
        results = [x for x in tensors_in(result) if x.is_floating_point() or x.is_complex()]
        results += [w for w in written if not any(w is r for r in results)]
        for x in results:
            record.bad_out |= badness(x)
        if record.bad_out:
            ignored = name in OVERWRITING or is_out_variant(func)
            record.bad_in = tuple(
                0 if ignored and any(x is w for w in written) else badness(b)
                for x, b in zip(operands, before, strict=True)
            )
        # A replay takes facts of what spoils a mask when it is run again; training is traced only once.
        fresh = (record.suspect or (self.live and record.spoils_mask())) and self._suspects < _MAX_SUSPECTS
        if fresh or record.index in self._wanted:
            self._suspects += fresh
            swapped = {id(x): b for x, b in zip(operands, before, strict=True) if b is not x}
            record.facts = closer_look(func, args, kwargs, swapped, results, values=self._values, spot=self._spot)
            record.facts |= self._caller(record.line)

    def _restart(self) -> None:
        """Forget all records: tensors made so far count as made before the trace."""
        self.records.clear()
        self._writers.clear()
        self._made_by_sequence.clear()
        self._suspects = 0

    def _caller(self, line: Line | None) -> dict[str, Any]:
        """Return the user's line behind a library's line, as a fact of an op; empty if there is none."""
        found = line is not None and line.in_library and innermost_user_line(past_own=self.live, past_libraries=True)
        return {"caller": {"file": found.shown, "line": found.number}} if found else {}

    # --- sources -----------------------------------------------------------------------------------------------------

    def note(self, x: Tensor, external: External) -> None:
        """Note a tensor from before the trace; the first note about its memory holds."""
        if (key := storage_key(x)) is not None:
            self._known.setdefault(key, external)

    def forget(self, x: Tensor) -> Tensor:
        """Forget earlier writers of a tensor's memory, which belonged to another tensor; return the tensor."""
        self._writers.forget(x)
        return x

    def source(self, x: Tensor) -> Source:
        """Return the ops that wrote the tensor's values, or the tensor from before the trace that it is."""
        key = storage_key(x)
        if key is None:
            return External("constant")
        writers = self._writers.of(x)
        return writers or self._known.get(key, External("constant"))

    def made(self, x: Tensor) -> bool:
        """Return whether an op of the trace has written to or allocated the tensor's memory."""
        return bool(self._writers.all_of(x))

    def made_bad(self, x: Tensor) -> bool:
        """Return whether an op of the trace that wrote to the tensor's memory had a bad result."""
        return any(self.records[i].bad_out for i in self._writers.all_of(x))

    def note_op(
        self,
        op: str,
        line: Line | None,
        operands: list[Tensor],
        value: Tensor,
        facts: dict[str, Any],
        *,
        also: tuple[External, int] | None = None,
    ) -> int:
        """Record an op that was not run under the tracer; ``also``: what else it read, and how bad that was.

        Returns:
            Its index.
        """
        record = OpRecord(len(self.records), op, "forward", None, line, tuple(self.source(x) for x in operands))
        record.bad_out = badness(value)
        record.bad_in = tuple(map(badness, operands))
        if also is not None:
            record.sources, record.bad_in = (*record.sources, also[0]), (*record.bad_in, also[1])
        record.facts = facts
        self.records.append(record)
        self._writers.made(value, record.index)
        return record.index

    def credit(self, value: Tensor, index: int | None) -> None:
        """Attribute the derivative of this value to an op recorded by :meth:`note_op`, or to none."""
        if value.grad_fn is not None:
            self._made_by_sequence[value.grad_fn._sequence_nr()] = index

    def _note_writes(self, index: int, operands: list[Tensor], written: list[Tensor], result: Any) -> None:
        """Note an op as the writer of the tensors it wrote to and of its new results."""
        for x in written:
            self._writers.wrote(x, index)
        given = {storage_key(x) for x in (*operands, *written)}
        for x in tensors_in(result):
            if storage_key(x) not in given:  # a view of an operand keeps the operand's writers
                self._writers.made(x, index)
