"""Towers of layers whose activations grow, and towers whose do not."""

from tests.support.samples import Sample
from tests.support.training import Training, normal, tensor


def tower(factor: float, *, layers: int = 8, start: float = 1.0, dtype: str = "float32") -> Training:
    """``layers`` more layers; the output of each is ``factor`` times that of the one before."""
    run = Training()
    for step, rows in run.tensors.items():
        for i in range(layers):
            row = tensor(step, "output", f"tower.{i}", len(rows), module_class="Linear", dtype=dtype)
            rows.append(row | normal(start * factor**i))
    return run


def cell(factor: float, calls: int = 16) -> Training:
    """A recurrent cell: each of its calls gives ``factor`` times what the one before gave."""
    run = Training()
    for step, rows in run.tensors.items():
        for i in range(calls):
            row = tensor(step, "output", "cell", len(rows), module_class="GRUCell", call=i)
            rows.append(row | normal(factor**i))
    return run


def a_steady_cell() -> Training:
    return cell(1.02)


def a_residual_stream() -> Training:
    """A hundred times larger at the end."""
    return tower(100 ** (1 / 7))


def one_large_layer() -> Training:
    run = tower(1.0)
    return run.change(lambda r: r.update(normal(2.0**20)), kind="output", module="tower.7")


def near_the_end_of_fp16_but_level() -> Training:
    """Far above 1, and no larger from layer to layer."""
    return tower(1.0, start=700.0, dtype="float16")


FIRING = {
    "five_times_per_layer": Sample(
        lambda: tower(5.0), module="tower.7", kind="output", severity="warning", says=("limit 2^13", "5 per layer"),
    ),
    "a_cell": Sample(
        lambda: cell(2.0), module="cell", severity="warning", says=("16 calls of GRUCell", "2 per call")
    ),
    "half_of_it_in_fp16": Sample(
        lambda: tower(2.4, start=10.0, dtype="float16"), module="tower.7", severity="warning",
    ),
}  # fmt: skip
HEALTHY = {f.__name__: f for f in (a_steady_cell, a_residual_stream, one_large_layer, near_the_end_of_fp16_but_level)}
