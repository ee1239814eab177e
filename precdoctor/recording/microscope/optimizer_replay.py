"""Replays an optimizer step on copies, to see which op made weights non-finite.

It starts from the state that the step left, with non-finite elements set to 0 and the step counter set back: the
arithmetic is the optimizer's own (``torch.optim`` or not), the operands those of the step up to that change. If the
replay is finite although state has become infinite, it is repeated with the format's maximum in place of infinities:
that is the largest number they can have been before. If a closure computes gradients, the step is replayed up to its
call, for all parameters. Writes to anything but the copies are refused, so nothing of the run changes.
"""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from precdoctor.recording import kernels
from precdoctor.recording.kernels.outside_user_modes import with_functions
from precdoctor.recording.microscope.examination import Examination
from precdoctor.recording.microscope.replay import Replay
from precdoctor.recording.microscope.tracer import External, Tracer
from precdoctor.recording.model import object_copies, static, tensor_leaves
from precdoctor.recording.model.optimizer_contents import groups_of, parameters_in, parameters_of, state_of
from precdoctor.recording.ops.dispatched_ops import storage_key
from precdoctor.recording.ops.source_lines import Line
from precdoctor.recording.ops.tensor_facts import NEG_INF, POS_INF, badness, describe, value_at
from precdoctor.recording.process import attach
from precdoctor.recording.scene.state_restore import RandomState
from precdoctor.recording.steps.persistent_state import Poisoned

_HOOKS = tuple(
    f"_optimizer_{which}_{when}_hooks"
    for which in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
)
_STOOD_IN = "state that had overflowed was taken to be its format's largest number before the step"
#: Maximum number of parameters reported per incident.
_MAX_PARAMETERS = 4
_SETTINGS = ("lr", "eps", "betas", "momentum", "weight_decay", "alpha", "rho", "lr_decay", "maximize", "amsgrad")
#: Settings that an infinity spoils like a NaN; others, such as a limit, may be infinite on purpose.
_FACTORS = frozenset(
    ("lr", "betas", "beta1", "beta2", "momentum", "dampening", "weight_decay", "alpha", "rho", "lr_decay", "etas")
)


class _ReachedError(Exception):
    """The step calls its closure, which would run the user's model: the replay ends."""


#: Returns a parameter's root, module and name.
Named = Callable[[Tensor], tuple[str, str, str]]


@dataclass(frozen=True, eq=False)
class SpoiltStep:
    """An optimizer's step that has made something non-finite, right after it, with the gradients still there.

    Attributes:
        before: copies of parameters from before the step, by ``id``; others start with non-finite elements set to 0.
        line: where the user called ``step``, for ops that torch's own code runs.
        values: whether facts may hold single values.
    """

    optimizer: torch.optim.Optimizer
    before: Mapping[int, Tensor]
    line: Line | None
    values: bool

    def replay(self, parameter: Tensor) -> Examination | None:
        """Find the op that made ``parameter`` non-finite; None if the step cannot be replayed or the replay is finite.

        If the replay is finite although state is infinite, it is repeated with the format's maximum in its place.
        """
        if parameter.grad is None or parameter.grad.layout is not torch.strided:
            return None
        given = [(parameter, parameter.grad)]
        found = self._replay(given, _finite_part)
        state = state_of(self.optimizer, parameter).values()
        if found is None and any(issubclass(type(x), Tensor) and badness(x) & (POS_INF | NEG_INF) for x in state):
            found = self._replay(given, _clipped)
            if found is not None:
                found.why = _STOOD_IN
        return found

    def replay_until_closure(self, given: Sequence[tuple[Tensor, Tensor]]) -> Examination | None:
        """Find the op that made a parameter non-finite before the step first called its closure; else None.

        Args:
            given: parameters and their gradients as the step began.
        """
        return self._replay(given, _finite_part, closure=True) if given else None

    def _replay(
        self, given: Sequence[tuple[Tensor, Tensor]], as_before: Callable[[Tensor], Tensor], *, closure: bool = False
    ) -> Examination | None:
        """Replay the step and find the op; ``as_before`` turns a state into what it may have been before the step."""
        random = RandomState.now()
        try:
            with kernels.apart_from_user_modes():
                again, clones, known = self._copy(given, as_before)
            tracer = Tracer(known, values=self.values, writes_to=frozenset(known))
            tracer.fallback = self.line
            step: Any = type(self.optimizer).step
            with with_functions(), tracer, torch.no_grad(), contextlib.suppress(_ReachedError):
                getattr(step, "__wrapped__", step)(again, *([_stop_at_closure] if closure else []))
        except Exception as error:  # noqa: BLE001 - the user's optimizer may do anything; parameter_events reports instead
            attach.let_through(error)
            return None
        finally:
            random.restore()
        clone, bad = next(((c, kinds) for c in clones if (kinds := badness(c.detach()))), (None, 0))
        if clone is None:
            return None
        done = Replay(None, tracer)
        done.bad_outputs.append(("weight", bad, tracer.source(clone)))
        found = done.slice()
        return Examination("origin", "optimizer", found=done, slice=found) if found.origins else None

    def _copy(
        self, given: Sequence[tuple[Tensor, Tensor]], as_before: Callable[[Tensor], Tensor]
    ) -> tuple[torch.optim.Optimizer, list[nn.Parameter], dict[int, External]]:
        """Return a copy of the optimizer with copies of some parameters, these copies, and the memory to write to."""
        optimizer = self.optimizer
        memo: dict[int, Any] = {id(p): p for p in parameters_of(optimizer)}
        kept = (x for p in parameters_of(optimizer) for x in state_of(optimizer, p).values())
        memo |= {id(x): x for x in kept if issubclass(type(x), Tensor)}
        known: dict[int, External] = {}
        clones: dict[int, nn.Parameter] = {}
        states: dict[Tensor, dict[str, Any]] = {}
        for parameter, grad in given:
            start = self.before.get(id(parameter), _finite_part(parameter.detach()))
            clone = memo[id(parameter)] = clones[id(parameter)] = nn.Parameter(start.detach().clone())
            clone.grad = grad.detach().clone()
            state = {k: _copy_state(k, v, as_before) for k, v in state_of(optimizer, parameter).items()}
            if state:
                states[clone] = state
            tensors = {"weight": clone, "grad": clone.grad, **dict(tensor_leaves.tensors(state))}
            known |= {key: External("weight", n) for n, x in tensors.items() if (key := storage_key(x)) is not None}
        there = static.own(optimizer)
        plain = {k: v for k, v in there.items() if k not in {"step", "state", "param_groups", *_HOOKS}}
        again: torch.optim.Optimizer = object.__new__(type(optimizer))
        memo[id(optimizer)] = again
        own = static.own(again)
        own.update(object_copies.deep_copy(plain, memo))
        own.update({name: OrderedDict() for name in _HOOKS if name in there})
        own["param_groups"] = groups = []
        for group in groups_of(optimizer):
            mine = [clones[id(p)] for p in parameters_in(group) if id(p) in clones]
            settings = {k: v for k, v in dict.items(group) if k != "params"}
            if mine:
                groups.append({**object_copies.deep_copy(settings, memo), "params": mine})
        own["state"] = defaultdict(dict, states)
        return again, list(clones.values()), known

    # --- rows without a replay ---------------------------------------------------------------------------------------

    def bad_parameters(self) -> list[Tensor]:
        """Return the optimizer's parameters that hold a NaN or an infinity."""
        found = ((p, tensor_leaves.plain(p)) for p in parameters_of(self.optimizer))
        return [p for p, dense in found if dense is not None and badness(dense.detach())]

    def parameter_events(self, bad: Sequence[Tensor], named: Named) -> list[dict[str, Any]]:
        """Return an ``op`` row per bad parameter; ``argument`` is weight, grad or the name of a state tensor."""
        rows = []
        for index, parameter in enumerate(bad[:_MAX_PARAMETERS]):
            state = {k: v for k, v in state_of(self.optimizer, parameter).items() if issubclass(type(v), Tensor)}
            tensors = {"weight": self.before.get(id(parameter)), "grad": parameter.grad, **state}
            rows.append(self._event(index, parameter, parameter, tensors, named))
        return rows

    def state_events(self, poisoned: Sequence[Poisoned], named: Named) -> list[dict[str, Any]]:
        """Return an ``op`` row per state tensor that the step made non-finite; ``state`` is the tensor's name."""
        rows = []
        for index, found in enumerate(poisoned[:_MAX_PARAMETERS]):
            parameter = found.parameter
            if parameter is None:
                continue
            tensors = {"weight": parameter, "grad": parameter.grad, found.name: found.tensor}
            rows.append(self._event(index, parameter, found.tensor, tensors, named, state=found.name))
        return rows

    def _event(
        self,
        index: int,
        parameter: Tensor,
        bad: Tensor,
        tensors: Mapping[str, Tensor | None],
        named: Named,
        **more: str,
    ) -> dict[str, Any]:
        """Return the row of ``bad``, a parameter or a state tensor of it; ``tensors`` are the operands of the step."""
        root, module, name = named(parameter)
        groups = (g for g in groups_of(self.optimizer) if any(p is parameter for p in parameters_in(g)))
        group: dict[str, Any] = next(groups, {})
        after = describe(bad.detach())
        operands = []
        for argument, x in tensors.items():
            plain = tensor_leaves.plain(x) if x is not None else None
            if plain is None:
                continue
            operands.append({"argument": argument, **describe(plain.detach())})
            if self.values and "first_bad" in after:
                operands[-1]["value"] = value_at(plain.detach(), after["first_bad"], bad.shape)
        data = {
            "index": index,
            "phase": "optimizer",
            "suspect": True,
            "bad_out": badness(bad.detach()),
            "bad_in": [0 for _ in operands],
            "parameter": name,
            **more,
            "operands": operands,
            "results": [after],
            "settings": {k: _plain(group[k]) for k in _SETTINGS if k in group},
        }
        return {"root": root, "module": module, "op": f"optim.{type(self.optimizer).__name__}.step", "data": data}


def _stop_at_closure() -> Tensor:
    raise _ReachedError


def _copy_state(name: str, value: Any, as_before: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of an optimizer state as it may have been before the step: ``step`` counts one less."""
    if name == "step":
        return value - 1
    if issubclass(type(value), Tensor):
        return as_before(value.detach().clone())
    if type(value) in (list, tuple):  # Shampoo's factors, L-BFGS's history
        return type(value)(_copy_state("", x, as_before) for x in value)
    if type(value) is dict:
        return {k: _copy_state("", x, as_before) for k, x in value.items()}
    return object_copies.deep_copy(value, {})


def _finite_part(x: Tensor) -> Tensor:
    """Return a float tensor with non-finite elements set to 0; any other tensor unchanged."""
    return torch.nan_to_num(x, 0.0, 0.0, 0.0) if x.is_floating_point() else x


def _clipped(x: Tensor) -> Tensor:
    """Return a float tensor with infinities set to the format's extremes, and NaN to 0: no value was larger before."""
    return torch.nan_to_num(x, 0.0) if x.is_floating_point() else x


def bad_settings(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> list[dict[str, Any]]:
    """Return settings, in the groups of these parameters, that are NaN, or infinite if that spoils every update.

    Returns:
        Number of the ``group``, ``name`` (``betas[1]``) and ``value`` of each.
    """
    wanted = {id(p) for p in parameters}
    found = []
    for number, group in enumerate(groups_of(optimizer)):
        if not any(id(p) in wanted for p in parameters_in(group)):
            continue
        for key, value in static.items(group):
            if key == "params":
                continue
            parts = [(f"[{i}]", v) for i, v in enumerate(value)] if type(value) is tuple else [("", value)]
            for index, part in parts:
                setting = _number(part)
                if math.isnan(setting) or (math.isinf(setting) and key in _FACTORS):
                    found.append({"group": number, "name": f"{key}{index}", "value": setting})
    return found


def _number(value: Any) -> float:
    """Return a setting as a number; 0 if it is none."""
    if (known := static.number(value)) is not None:
        return known
    dense = tensor_leaves.plain(value) if issubclass(type(value), Tensor) and value.numel() == 1 else None
    return float(dense.detach()) if dense is not None and dense.is_floating_point() else 0.0


def _plain(value: Any) -> Any:
    """Return a setting as a value for JSON; None for a tensor with several elements."""
    if issubclass(type(value), Tensor):
        return float(value) if value.numel() == 1 else None
    return static.plain(value)
