"""Lists all ops of the steps that ``record --ops`` names: the dispatch mode, and the watcher that logs the list.

Every op runs as it is; the mode notes its operands and results. Compiled code counts as one op, whatever runs inside:
``compiled.forward`` reads the arguments and the module's parameters and makes the result; ``compiled.backward`` is its
autograd node.
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
    op_name,
    sequence_number,
    tensors_in,
    written_by,
)
from precdoctor.recording.ops.source_lines import innermost_user_line
from precdoctor.recording.recorder.step_context import StepContext
from precdoctor.recording.slots.step_batch import OpBatch

#: Whether torch can compile while a mode is open; an older one would run code eagerly that is not compiled yet.
_CAN_BE_BESIDE_COMPILED = hasattr(TorchDispatchMode, "ignore_compile_internals")
#: The autograd node of compiled code, and the maximum number of nodes searched for it: views of its results come first.
_NODE, _MAX_NODES = "CompiledFunctionBackward", 4
#: Views whose schema does not say so; and ops that return memory to which nothing was written.
_VIEWS = frozenset(("_unsafe_view", "lift_fresh"))
_EMPTY = UNINITIALISED | {"empty_permuted", "_empty_affine_quantized"}

#: Namespaces of ops left out: our own, and collectives, whose results arrive later.
_NAMESPACES = frozenset(("precdoctor", "c10d", "_c10d_functional", "_dtensor", "symm_mem"))


@dataclass
class _Region:
    """A call of compiled code that is running."""

    owner: Any
    index: int
    reads: list[Read]
    where: Where


class OpMode(WindowMode):
    """Lists ops while it is entered.

    Attributes:
        table: the rows so far.
        compiled: number of calls of compiled code.
    """

    beside_compiled = _CAN_BE_BESIDE_COMPILED

    def __init__(self, targets: Targets, *, redact: bool) -> None:
        super().__init__()
        self.table = OpTable(targets, redact=redact)
        self.compiled = 0
        self._region: _Region | None = None
        self._nodes: list[Any] = []
        self._pending: dict[int, tuple[int, list[Read]]] = {}

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.cannot_look or self.table.full or self._is_inside() or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        sequence, begun = sequence_number(), None
        name = op_name(func)
        if _makes_something(func):
            begun = self.guarded(lambda: self.table.begin(list(_operands(func, name, args, kwargs))))
        result = func(*args, **kwargs)
        if begun is not None:
            self.guarded(lambda: self._add_op(func, args, kwargs, begun, sequence, result))
        elif func.is_view:
            self.guarded(lambda: self.where(self.phase(), sequence))  # notes the module, which its backward ops look up
        return result

    def _add_op(
        self, func: Any, args: Any, kwargs: Any, begun: tuple[int, list[Read]], sequence: int, result: Any
    ) -> None:
        phase = self.phase()
        results = [*tensors_in(result)]
        results += [x for x in written_by(func, args, kwargs) if not any(x is r for r in results)]
        where, settings = self.where(phase, sequence), settings_of(func, args, kwargs)
        self.table.end(*begun, results, str(func), phase, where, settings, self.micro_step)

    # --- compiled code -----------------------------------------------------------------------------------------------

    def _is_inside(self) -> bool:
        if self._region is not None:
            return True
        node: Any = torch._C._current_autograd_node()
        return node is not None and bool(node.name() == _NODE)

    def module_entered(self, module: nn.Module, args: Any) -> None:
        """Begin a call of compiled code if the module is compiled (``torch.compile(model)``)."""
        if type(module).__name__ == "OptimizedModule":
            self.enter_region(module, args)

    def enter_region(self, owner: Any, args: Any, place: tuple[str, str] | None = None) -> None:
        """Begin a call of compiled code.

        Args:
            owner: the module or function.
            args: its arguments.
            place: its root and module, unless it belongs to the running module.
        """
        if not (self._region is not None or self.cannot_look or self.table.full):
            self.guarded(lambda: self._enter(owner, args, place))

    def _enter(self, owner: Any, args: Any, place: tuple[str, str] | None) -> None:
        operands: list[Operand] = list(tensor_leaves.tensors(args))
        if issubclass(type(owner), nn.Module):
            operands += [("parameter", x) for x in static.parameters(owner)]
        where = Where(*(place or (self.modules[-1] if self.modules else ("", ""))), innermost_user_line(past_own=True))
        self._region = _Region(owner, *self.table.begin(operands), where)

    def module_left(self, owner: Any, result: Any) -> None:
        """End a call of compiled code, of a module or a function; ``result`` is None if it raised or is unknown."""
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
        """Hook the autograd node of compiled code, to list its backward pass as one op."""

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

    def remove_hooks(self) -> None:
        for handle in self._nodes:
            handle.remove()
        self._nodes, self._region = [], None


@functools.cache
def _makes_something(func: Any) -> bool:
    """Return whether an op computes new numbers: views, empty tensors and ops left out do not."""
    schema = func._schema
    if func.is_view or op_name(func) in _VIEWS | _EMPTY or func.namespace in _NAMESPACES:
        return False
    makes = any("Tensor" in str(r.type) for r in schema.returns)
    return makes or any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)


def _operands(func: Any, name: str, args: Any, kwargs: Any) -> Iterator[Operand]:
    """Yield the tensors that an op reads, with the arguments' names."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.is_out or (i == 0 and name in OVERWRITING):
            continue
        for x in tensors_in(args[i] if i < len(args) else kwargs.get(argument.name)):
            yield argument.name, x


def _node_of(x: Tensor) -> Any:
    """Return the autograd node of compiled code behind a tensor; None if there is none."""
    node: Any = x.grad_fn
    for _ in range(_MAX_NODES):
        if node is None or node.name() == _NODE:
            return node
        node = node.next_functions[0][0] if node.next_functions else None
    return None


class OpList:
    """Provides a :class:`~precdoctor.recording.deepscan.window.StepWindow` with a mode for each step to be listed."""

    without_modules = True

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self.forget()

    def forget(self) -> None:
        """Reset everything, and read the options anew."""
        #: Whether no step's ops are listed.
        self.off = not self._context.options.ops
        self._mode: OpMode | None = None
        self._refused: set[str] = set()
        self._done: set[int] = set()

    def mode(self, step: int) -> WindowMode | None:
        """Return a new mode if the step is one of those asked for and not yet listed, else None."""
        options = self._context.options
        if step not in options.ops or step in self._done:
            return None
        self._mode = OpMode(Targets(self._context.names, threads=self._context.threads), redact=options.redact_names)
        return self._mode

    def refused(self, root: str, why: str) -> None:
        """Log why a step was not listed, once per reason."""
        self._mode = None
        self._done.add(self._context.step)
        if why not in self._refused:
            self._refused.add(why)
            self._context.event("ops", root=root, data={"outcome": "refused", "why": why})

    def region(self, owner: Any, args: Any) -> Callable[[Any], None] | None:
        """Begin a call of compiled code; return a callback that takes its result, None if no list is being made."""
        mode = self._mode
        if mode is None or mode.over:
            return None
        place = self._context.names.find(owner) if issubclass(type(owner), nn.Module) else None
        mode.enter_region(owner, args, (place.root, place.module) if place is not None else None)
        return lambda result: mode.module_left(owner, result)

    def ended(self, mode: WindowMode) -> None:
        """Hand the rows over for output, and log the outcome: the step is over."""
        assert isinstance(mode, OpMode), "made here"
        context, table, self._mode = self._context, mode.table, None
        mode.remove_hooks()
        self._done.add(context.step)
        if mode.failure is not None:
            why = f"{type(mode.failure).__name__}: {mode.failure}"[:500]
            context.event("warning", data={"message": f"the list of ops of step {context.step} was dropped: {why}"})
            context.event("ops", data={"outcome": "dropped", "why": why})
            return
        data = {"ops": table.ops, "tensors": table.rows, "compiled": mode.compiled, "spent_ns": mode.spent_ns}
        context.event("ops", data={"outcome": "done", "complete": not table.full, **data})
        if table.rows:
            context.current.ops = OpBatch(context.step, table.columns, table.rows)
