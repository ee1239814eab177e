"""Two dispatch modes: one watches the reduced run, the other makes every op of a replay compute in a wide format.

Widening happens below autograd and autocast, op by op. So it also reaches what no setting turns off: ``x.half()`` in a
forward, a ``torch.zeros(..., dtype=torch.bfloat16)`` to accumulate in, an autocast region that a framework opens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from precdoctor.recording.model import tensor_leaves
from precdoctor.recording.ops.dispatched_ops import left_to_others, op_name, tensors_in, written_by

#: Bits of a float that any wide format here has more of.
_BITS = {torch.float64: 64, torch.float32: 32, torch.float16: 16, torch.bfloat16: 16}
#: Random ops whose result depends on nothing but generator and arguments; others that draw (attention with dropout)
#: are run as they are.
_DRAWS = frozenset(
    ("bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial", "native_dropout",
     "normal", "normal_", "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "random",
     "random_", "randperm", "uniform", "uniform_")
)  # fmt: skip


class RefusedError(Exception):
    """The replay would not be without a trace, or not be the same computation."""


class _Mode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # as torch has it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(tensor_leaves.computes_itself(t) for t in types):
            return left_to_others(func, types, args, kwargs)
        if kwargs.get("generator") is not None:
            raise RefusedError("its forward pass draws from a random number generator of its own")
        if torch.Tag.nondeterministic_seeded in func.tags and func._can_decompose():
            with self:  # dropout, where torch has not taken it apart itself: its mask is to be drawn once for both
                return func.decompose(*args, **kwargs)
        return self.run(func, args, kwargs)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


class Watching(_Mode):
    """Notes the floating-point formats ops compute in, and keeps what random ops draw.

    Attributes:
        dtypes: of results, less views and other ops that compute nothing.
        draws: op and results, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()
        self.draws: list[tuple[str, tuple[Tensor, ...]]] = []

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if not func.is_view:
            self.dtypes.update(x.dtype for x in tensors_in(result) if x.is_floating_point())
        if _draws(func):
            self.draws.append((op_name(func), tuple(x.detach().clone() for x in tensors_in(result))))
        return result


class Widened(_Mode):
    """Inside, floating-point ops compute in ``wide`` and random ops give what they gave in the watched run.

    Attributes:
        same_draws: false once a random op came that was not there, or gave another shape.
    """

    def __init__(self, wide: torch.dtype, draws: list[tuple[str, tuple[Tensor, ...]]]) -> None:
        super().__init__()
        self.wide = wide
        self._draws = iter(draws)
        self.same_draws = True

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kept = set(map(id, written_by(func, args, kwargs)))
        widen = not func.is_view
        args = tuple(self._widened(a, kept, widen=widen) for a in args)
        kwargs = {k: self._widened(v, kept, widen=widen) for k, v in kwargs.items()}
        result = func(*args, **kwargs)
        return self._as_drawn(func, args, result) if _draws(func) else result

    def _widened(self, value: Any, kept: set[int], *, widen: bool) -> Any:
        if isinstance(value, Tensor):
            return value.to(self.wide) if widen and id(value) not in kept and self.narrower(value.dtype) else value
        if isinstance(value, torch.dtype):
            return self.wide if self.narrower(value) else value
        if type(value) in (list, tuple):
            return type(value)(self._widened(v, kept, widen=widen) for v in value)
        return value

    def narrower(self, dtype: torch.dtype) -> bool:
        """Whether a floating-point format keeps less than the wide one."""
        return dtype.is_floating_point and _BITS.get(dtype, 8) < _BITS[self.wide]

    def _as_drawn(self, func: Any, args: tuple[Any, ...], result: Any) -> Any:
        name, drawn = next(self._draws, ("", ()))
        mine = tuple(tensors_in(result))
        if name != op_name(func) or [x.shape for x in drawn] != [x.shape for x in mine]:
            self.same_draws = False
            return result
        if name == "native_dropout":
            x, p, train = args[:3]
            kept = drawn[1].to(x.dtype)
            return (x * kept / max(1.0 - p, 1e-12) if train is not False else x), drawn[1]
        if func._schema.arguments and func._schema.arguments[0].alias_info is not None:
            return mine[0].copy_(drawn[0])
        return drawn[0].to(mine[0].dtype)


def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags and op_name(func) in _DRAWS
