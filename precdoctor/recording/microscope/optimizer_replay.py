"""Running an optimizer's step again for one parameter, on copies, to see which operation made its weights non-finite.

The state is the one the step left behind, its non-finite elements set to 0 and its counter set back: the arithmetic is
the user's own (``torch.optim`` or not), the operands are those of the step up to that. Whatever the optimizer would
write to beside the copies is refused, so that nothing of the run can change.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from precdoctor.recording import attach, kernels
from precdoctor.recording.microscope.examination import Examination
from precdoctor.recording.microscope.facts import badness
from precdoctor.recording.microscope.frames import Line
from precdoctor.recording.microscope.ops import storage_key
from precdoctor.recording.microscope.replay import Replay
from precdoctor.recording.microscope.restore import RandomState
from precdoctor.recording.microscope.tracer import External, Tracer

_HOOKS = tuple(
    f"_optimizer_{which}_{when}_hooks"
    for which in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
)


class _Sandbox(Tracer):
    """Refuses to run an op that writes to memory from before the trace."""

    allowed: frozenset[int] = frozenset()

    def admit(self, written: list[Tensor]) -> None:
        if any(storage_key(x) not in self.allowed and not self.made(x) for x in written):
            raise RuntimeError("the optimizer writes to more than this parameter and its state")


def replay_step(
    optimizer: torch.optim.Optimizer, parameter: Tensor, before: Tensor | None, line: Line | None, *, values: bool
) -> Examination | None:
    """The op that makes ``parameter`` non-finite; None when the step cannot be run again, or comes out finite.

    Args:
        optimizer: right after the step, the gradients still there.
        parameter: non-finite now.
        before: a copy of it from before the step; null: what is finite of it now stands in.
        line: where the user called ``step``, for ops that torch's own code runs.
        values: let facts hold single values.
    """
    if parameter.grad is None or parameter.grad.layout is not torch.strided:
        return None
    random = RandomState.now()
    try:
        with kernels.apart_from_user_modes():
            again, clone, known = _copied(optimizer, parameter, before)
        tracer = _Sandbox(known, values=values)
        tracer.allowed = frozenset(known)
        tracer.fallback = line
        step = type(optimizer).step
        with tracer, torch.no_grad():
            getattr(step, "__wrapped__", step)(again)
    except Exception as error:  # noqa: BLE001 - an optimizer of the user's own may do anything; the facts of the step stand
        attach.let_through(error)
        return None
    finally:
        random.restore()
    if not (bad := badness(clone.detach())):
        return None
    done = Replay(None, tracer)
    done.bad_outputs.append(("weight", bad, tracer.source(clone)))
    found = done.slice()
    return None if found is None or not found.origins else Examination("origin", "optimizer", found=done, slice=found)


def _copied(
    optimizer: torch.optim.Optimizer, parameter: Tensor, before: Tensor | None
) -> tuple[torch.optim.Optimizer, nn.Parameter, dict[int, External]]:
    """The optimizer for a copy of one parameter, and the memory it may write to."""
    assert parameter.grad is not None, "checked by the caller"
    start = before if before is not None else _mended(parameter.detach())
    clone = nn.Parameter(start.detach().clone())
    clone.grad = parameter.grad.detach().clone()
    state = {k: _state(k, v) for k, v in optimizer.state.get(parameter, {}).items()}
    memo: dict[int, Any] = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    memo |= {id(x): x for own in optimizer.state.values() for x in own.values() if isinstance(x, Tensor)}
    memo[id(parameter)] = clone
    plain = {k: v for k, v in vars(optimizer).items() if k not in {"step", "state", "param_groups", *_HOOKS}}
    groups = [g for g in optimizer.param_groups if any(p is parameter for p in g["params"])]
    settings = {k: v for k, v in groups[0].items() if k != "params"}
    again: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(again).update(copy.deepcopy(plain, memo))
    vars(again).update({name: OrderedDict() for name in _HOOKS if name in vars(optimizer)})
    again.param_groups = [{**copy.deepcopy(settings, memo), "params": [clone]}]
    again.state = defaultdict(dict, {clone: state})
    tensors = {"weight": clone, "grad": clone.grad, **{k: x for k, x in state.items() if isinstance(x, Tensor)}}
    known = {key: External("weight", n) for n, x in tensors.items() if (key := storage_key(x)) is not None}
    return again, clone, known


def _state(name: str, value: Any) -> Any:
    if name == "step":
        return value - 1
    if isinstance(value, Tensor):
        return _mended(value.detach().clone())
    return copy.deepcopy(value)


def _mended(x: Tensor) -> Tensor:
    return torch.nan_to_num(x, 0.0, 0.0, 0.0) if x.is_floating_point() else x
