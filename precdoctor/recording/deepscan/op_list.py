"""The lists of ops of a process (``record --ops``): on which steps, how they reach the log, and the dispatch mode.

The mode runs every op as it is, and notes what it read and what it made. Compiled code is one op, whatever runs inside:
``compiled.forward`` reads the arguments and the module's parameters and makes the result; ``compiled.backward`` is
autograd's node of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from precdoctor.recording.deepscan.op_table import Operand, OpTable, Read, settings_of
from precdoctor.recording.deepscan.scanned_op import Where
from precdoctor.recording.deepscan.targets import Targets
from precdoctor.recording.deepscan.window_mode import WindowMode
from precdoctor.recording.model import static, tensor_leaves
from precdoctor.recording.ops.dispatched_ops import (
    OVERWRITING,
    UNINITIALISED,
    left_to_others,
    op_name,
    sequence_number,
    tensors_in,
    written_by,
)
from precdoctor.recording.ops.source_lines import innermost_user_line
from precdoctor.recording.recorder.step_context import StepContext
from precdoctor.recording.slots.step_batch import OpBatch

#: Before torch takes no notice of such modes, what is not compiled yet would run eagerly below one.
_CAN_BE_BESIDE_COMPILED = hasattr(TorchDispatchMode, "ignore_compile_internals")
#: The autograd node of compiled code, and how many nodes may stand before it: views of its results.
_NODE, _MAX_NODES = "CompiledFunctionBackward", 4
#: They are views although their schema says nothing of it; and memory that nobody has written to.
_VIEWS = frozenset(("_unsafe_view", "lift_fresh"))
_EMPTY = UNINITIALISED | {"empty_permuted", "_empty_affine_quantized"}

#: Ours; and collectives, whose results come later.
_NAMESPACES = frozenset(("precdoctor", "c10d", "_c10d_functional", "_dtensor", "symm_mem"))


@dataclass
class _Region:
    """A call of compiled code."""

    owner: Any
    index: int
    reads: list[Read]
    where: Where


class OpMode(WindowMode):
    """Lists ops while it is entered.

    Args:
        targets: what is known of the memory of weights.
        redact: keep source text out.

    Attributes:
        table: the list so far.
        compiled: calls of compiled code in it.
    """

    beside_compiled = _CAN_BE_BESIDE_COMPILED

    def __init__(self, targets: Targets, *, redact: bool) -> None:
        super().__init__()
        self.table = OpTable(targets, redact=redact)
        self.compiled = 0
        self._region: _Region | None = None
        self._nodes: list[Any] = []
        self._pending: dict[int, tuple[int, list[Read]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(tensor_leaves.computes_itself(t) for t in types):
            return left_to_others(func, types, args, kwargs)
        if self.cannot_look or self.table.full or self._is_inside() or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        sequence, begun = sequence_number(), None
        name = op_name(func)
        if _makes_something(func):
            begun = self.guarded(lambda: self.table.begin(list(_operands(func, name, args, kwargs))))
        result = func(*args, **kwargs)
        if begun is not None:
            self.guarded(lambda: self._ran(func, args, kwargs, begun, sequence, result))
        elif func.is_view:
            self.guarded(lambda: self.where(self.phase(), sequence))  # its gradient belongs to the module it stands in
        return result

    def _ran(
        self, func: Any, args: Any, kwargs: Any, begun: tuple[int, list[Read]], sequence: int, result: Any
    ) -> None:
        phase = self.phase()
        results = [*tensors_in(result)]
        results += [x for x in written_by(func, args, kwargs) if not any(x is r for r in results)]
        where, settings = self.where(phase, sequence), settings_of(func, args, kwargs)
        self.table.end(*begun, results, str(func), phase, where, settings, self.micro_step)

    # --- compiled code -----------------------------------------------------------------------------------------------

    def _is_inside(self) -> bool:
        """Whether compiled code runs."""
        if self._region is not None:
            return True
        node: Any = torch._C._current_autograd_node()
        return node is not None and bool(node.name() == _NODE)

    def module_entered(self, module: nn.Module, args: Any) -> None:
        """A compiled module (``torch.compile(model)``) begins."""
        if type(module).__name__ == "OptimizedModule":
            self.enter_region(module, args)

    def module_left(self, module: nn.Module, result: Any) -> None:
        """It has returned, or raised."""
        self.leave_region(module, result)

    def enter_region(self, owner: Any, args: Any, place: tuple[str, str] | None = None) -> None:
        """Compiled code is called.

        Args:
            owner: the module or function.
            args: its arguments.
            place: root and module it is, where that is not the module that runs.
        """
        if not (self._region is not None or self.cannot_look or self.table.full):
            self.guarded(lambda: self._enter(owner, args, place))

    def _enter(self, owner: Any, args: Any, place: tuple[str, str] | None) -> None:
        operands: list[Operand] = list(tensor_leaves.tensors(args))
        if issubclass(type(owner), nn.Module):
            operands += [("parameter", x) for x in static.parameters(owner)]
        where = Where(*(place or (self.modules[-1] if self.modules else ("", ""))), innermost_user_line(past_own=True))
        self._region = _Region(owner, *self.table.begin(operands), where)

    def leave_region(self, owner: Any, result: Any) -> None:
        """It has returned; ``result`` is None where it raised, or is not known."""
        region = self._region
        if region is not None and region.owner is owner:
            self._region = None
            self.guarded(lambda: self._leave(region, result))

    def _leave(self, region: _Region, result: Any) -> None:
        results = [x for _, x in tensor_leaves.tensors(result)]
        self.compiled += 1
        self.table.end(
            region.index, region.reads, results, "compiled.forward", self.phase(), region.where, None, self.micro_step
        )
        for node in {id(n): n for x in results if (n := _node_of(x)) is not None}.values():
            self._follow(node, region.where)

    def _follow(self, node: Any, where: Where) -> None:
        """Have autograd show what its node of compiled code is given and gives."""

        def before(gradients: Sequence[Tensor | None]) -> None:
            if not (self.cannot_look or self.table.full):
                given: list[Operand] = [("gradient", x) for x in gradients if x is not None]
                if (begun := self.guarded(lambda: self.table.begin(given))) is not None:
                    self._pending[id(node)] = begun

        def after(made: Sequence[Tensor | None], _given: Any) -> None:
            if (begun := self._pending.pop(id(node), None)) is not None:
                found = [x for x in made if x is not None]
                micro_step = self.micro_step
                self.guarded(
                    lambda: self.table.end(*begun, found, "compiled.backward", "backward", where, None, micro_step)
                )

        self._nodes += [node.register_prehook(before), node.register_hook(after)]

    def let_go(self) -> None:
        """Of autograd's nodes."""
        for handle in self._nodes:
            handle.remove()
        self._nodes, self._region = [], None


@functools.cache
def _makes_something(func: Any) -> bool:
    """Whether an op leaves numbers in tensors that were not there before."""
    schema = func._schema
    if func.is_view or op_name(func) in _VIEWS | _EMPTY or func.namespace in _NAMESPACES:
        return False
    makes = any("Tensor" in str(r.type) for r in schema.returns)
    return makes or any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)


def _operands(func: Any, name: str, args: Any, kwargs: Any) -> Iterator[Operand]:
    """What an op reads, with the arguments' names."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.is_out or (i == 0 and name in OVERWRITING):
            continue
        for x in tensors_in(args[i] if i < len(args) else kwargs.get(argument.name)):
            yield argument.name, x


def _node_of(x: Tensor) -> Any:
    node: Any = x.grad_fn
    for _ in range(_MAX_NODES):
        if node is None or node.name() == _NODE:
            return node
        node = node.next_functions[0][0] if node.next_functions else None
    return None


class OpList:
    """Asks a :class:`~precdoctor.recording.deepscan.window.StepWindow` for the steps whose ops are listed."""

    without_modules = True

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self.forget()

    def forget(self) -> None:
        """Begin anew, with the options there are now."""
        #: No step's ops are listed.
        self.off = not self._context.options.ops
        self._mode: OpMode | None = None
        self._refused: set[str] = set()
        self._done: set[int] = set()

    def mode(self, step: int) -> WindowMode | None:
        """A new list, where the step is one of those asked for."""
        options = self._context.options
        if step not in options.ops or step in self._done:
            return None
        self._mode = OpMode(Targets(self._context.names, threads=self._context.threads), redact=options.redact_names)
        return self._mode

    def refused(self, root: str, why: str) -> None:
        """Log the reason, once."""
        self._mode = None
        self._done.add(self._context.step)
        if why not in self._refused:
            self._refused.add(why)
            self._context.event("ops", root=root, data={"outcome": "refused", "why": why})

    def region(self, owner: Any, args: Any) -> Callable[[Any], None] | None:
        """A compiled function, or a module compiled in place, is called; what is returned takes its result."""
        mode = self._mode
        if mode is None or mode.over:
            return None
        place = self._context.names.find(owner) if issubclass(type(owner), nn.Module) else None
        mode.enter_region(owner, args, (place.root, place.module) if place is not None else None)
        return lambda result: mode.leave_region(owner, result)

    def ended(self, mode: WindowMode) -> None:
        """The step is over: hand its rows over."""
        assert isinstance(mode, OpMode), "made here"
        context, table, self._mode = self._context, mode.table, None
        mode.let_go()
        self._done.add(context.step)
        if mode.failure is not None:
            why = f"{type(mode.failure).__name__}: {mode.failure}"[:500]
            context.event("warning", data={"message": f"the list of ops of step {context.step} was dropped: {why}"})
            context.event("ops", data={"outcome": "dropped", "why": why})
            return
        data = {"ops": table.ops, "tensors": table.rows, "compiled": mode.compiled, "spent_ns": mode.spent_ns}
        context.event("ops", data={"outcome": "done", "complete": not table.full, **data})
        if table.rows:
            context.current.ops = OpBatch(context.step, table.columns(), table.rows)
