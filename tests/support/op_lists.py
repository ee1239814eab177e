"""Lists of ops of small programs in NumPy, as the recorder leaves them: with real values, fingerprints and sketches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from precdoctor.comparison.op_lists import Op, _ops
from precdoctor.numerics import sketch

Array = np.ndarray[Any, Any]


def sketch_of(x: Array) -> list[float]:
    """By its definition, one element after the other."""
    flat = x.astype(np.float64).ravel()
    at = np.arange(flat.size)
    of_tiles = sketch.repetition_signs(0, flat.size // sketch.TILE + 1)
    signs = sketch.tile_signs()[at % sketch.TILE] * of_tiles[at // sketch.TILE]
    return [float((flat * signs)[at % sketch.WIDTH == k].sum()) for k in range(sketch.WIDTH)]


class Program:
    """Runs ops and lists them.

    Args:
        module: they run in it.
    """

    def __init__(self, module: str = "layer") -> None:
        self.rows: list[dict[str, Any]] = []
        self.module = module
        self._made: dict[int, int] = {}
        self._alive: list[Array] = []
        self._ops = 0

    def run(
        self,
        name: str,
        work: Callable[..., Array],
        *operands: Array,
        line: int = 1,
        phase: str = "forward",
        **settings: Any,
    ) -> Array:
        """The result of ``work``, in the dtype it returns."""
        result = work(*operands)
        head = {
            "index": self._ops,
            "op": f"aten.{name}",
            "phase": phase,
            "root": "Net#0",
            "module": self.module,
            "file": "model.py",
            "line": line,
            "code": f"line {line}",
            "settings": json.dumps(settings) if settings else None,
        }
        for position, x in enumerate(operands):
            self.rows.append({**head, "side": "in", "position": position, "argument": f"x{position}",
                              "producer": self._made.get(id(x)), **columns(x)})  # fmt: skip
        self.rows.append({**head, "side": "out", "position": 0, **columns(result)})
        self._made[id(result)] = self._ops
        self._alive.append(result)
        self._ops += 1
        return result

    @property
    def ops(self) -> list[Op]:
        """As the comparison reads them."""
        empty = dict.fromkeys(("argument", "name", "producer"))
        return list(_ops({**empty, **row} for row in self.rows))


def columns(x: Array) -> dict[str, Any]:
    """The columns of a tensor."""
    wide = x.astype(np.float64)
    digest = hashlib.blake2b(x.tobytes() + str((x.dtype, x.shape)).encode(), digest_size=8).digest()
    return {
        "dtype": str(x.dtype),
        "shape": list(x.shape),
        "numel": x.size,
        "fingerprint": int.from_bytes(digest, "little"),
        "nan": 0,
        "pos_inf": 0,
        "neg_inf": 0,
        "amax": float(np.abs(wide).max()),
        "sum": float(wide.sum()),
        "sum_sq": float((wide**2).sum()),
        "sketch": sketch_of(x),
    }


#: What a layer of :func:`network` does, by the name of its op.
LAYERS: tuple[tuple[str, Callable[[Array], Array]], ...] = (
    ("mul.Tensor", lambda x: x * np.float32(1.25)),
    ("add.Tensor", lambda x: x + np.float32(0.5)),
    ("tanh.default", np.tanh),
    ("pow.Tensor_Scalar", lambda x: np.sqrt(np.abs(x))),
)


def network(
    layers: Sequence[int], casts: frozenset[int] = frozenset(), fault: int | None = None, *, scale: float = 1.5
) -> Program:
    """A chain of layers on 4 x 16 numbers.

    Args:
        layers: which of :data:`LAYERS` each one is.
        casts: layers whose operand is cast to float16 and back first, by ops of their own.
        fault: the layer whose result is wrong, times ``scale``.
    """
    program = Program()
    x = np.random.default_rng(0).normal(1.0, 0.5, (4, 16)).astype(np.float32)
    for at, kind in enumerate(layers):
        name, work = LAYERS[kind]
        if at in casts:
            x = program.run("_to_copy.default", lambda v: v.astype(np.float16), x, line=at + 1, dtype="float16")
            x = program.run("_to_copy.default", lambda v: v.astype(np.float32), x, line=at + 1, dtype="float32")
        wrong = np.float32(scale if at == fault else 1.0)
        x = program.run(name, lambda v, work=work, wrong=wrong: work(v) * wrong, x, line=at + 1)
    program.run("sum.default", lambda v: v.sum(keepdims=True), x, line=len(layers) + 1, phase="loss")
    return program
