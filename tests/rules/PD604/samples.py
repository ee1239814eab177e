"""Towers of layers whose activations grow, and towers whose do not."""

from tests.support.samples import Sample
from tests.support.scanning import fact, scanned, with_scans
from tests.support.training import Training, normal, tensor

LAYER = "blocks.0.attn.qkv"


def tower(factor: float, *, layers: int = 8, start: float = 1.0, dtype: str = "float32") -> Training:
    """``layers`` more layers; the output of each is ``factor`` times that of the one before."""
    run = Training()
    for step, rows in run.tensors.items():
        for i in range(layers):
            row = tensor(step, "output", f"tower.{i}", len(rows), module_class="Linear", dtype=dtype)
            rows.append(row | normal(start * factor**i))
    return run


def residual_stack(factor: float, *, branch: float, backward: float, layers: int = 12) -> Training:
    """Residual layers; per layer their outputs, what is inside of them, and gradients backwards grow by these."""
    run = Training()
    for step, rows in run.tensors.items():
        for i in range(layers):
            inner = (("norm", "LayerNorm", 0.9), ("fc", "Linear", 0.7 * branch**i))
            for name, class_, rms in inner if branch == 1.0 else inner[1:]:
                row = tensor(step, "output", f"stack.{i}.{name}", len(rows), module_class=class_)
                rows.append(row | normal(rms))
            for kind, rms in (("output", factor**i), ("grad_output", 1e-3 * backward**-i)):
                row = tensor(step, kind, f"stack.{i}", len(rows), module_class="Residual")
                rows.append(row | normal(rms))
    return run


def without_a_norm() -> Training:
    return residual_stack(1.4, branch=1.4, backward=1.4)


def a_stream_of_normed_branches() -> Training:
    """A trained transformer: the last linear layers write more than the first, behind norms."""
    return residual_stack(1.4, branch=1.0, backward=1.4)


def level_gradients() -> Training:
    """Heads beside one another, for targets of different size."""
    return residual_stack(1.4, branch=1.4, backward=1.0)


def a_few_layers_without_a_norm() -> Training:
    return residual_stack(1.8, branch=1.8, backward=1.8, layers=7)


def a_sum() -> Training:
    """Equal branches that point the same way: each output is one branch larger than the one before."""
    run = residual_stack(1.0, branch=1.0, backward=1.0)
    for rows in run.tensors.values():
        for row in rows:
            if row["module"].startswith("stack."):
                i = int(row["module"].split(".")[1])
                row.update(normal(1e-3 / (1 + i) if row["kind"] == "grad_output" else 1.0 + i))
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


def recurrence(binades: float, phase: str = "forward", *, calls: int = 50, steps: tuple[int, ...] = (0, 1)) -> Training:
    """An op that a module repeats; each of its results is larger than the one before, and the last is the output."""
    course = [2.0 ** (binades * i / 15) for i in range(16)]
    told = fact(
        "repeated", "addmm.default", module=LAYER, dtype="float32", phase=phase, calls=calls, rising=1.0, amax=course
    )
    run = scanned(told, steps=steps)
    return run.change(lambda r: r.update(normal(2.0 ** (binades - 3))), kind="output", module=LAYER)


def given_on_by_its_last_child(amax: float = 2.0**12) -> Training:
    """The module returns what its child returns, which has the row."""
    run = recurrence(15.0)
    run.change(lambda r: r.update(module=f"{LAYER}.out", **normal(amax)), kind="output", module=LAYER)
    return run


def a_child_of_sines() -> Training:
    return given_on_by_its_last_child(0.5)


def frequencies() -> Training:
    """`2**i * x` for each i, of which the module returns the sines."""
    run = recurrence(15.0)
    return run.change(lambda r: r.update(normal(0.5)), kind="output", module=LAYER)


def a_recurrence_with_clipped_gradients() -> Training:
    return recurrence(18.0, "backward")


def a_recurrence_that_settles() -> Training:
    """It explodes in the first steps only."""
    return with_scans(recurrence(20.0), 8, 16, 24)


def few_repetitions() -> Training:
    return recurrence(20.0, calls=4)


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
    "without_a_norm": Sample(
        without_a_norm, module="stack.11", kind="output", severity="warning",
        says=("limit 2^4", "1.4 per layer", "gradients grow"),
    ),
    "a_recurrence": Sample(
        lambda: recurrence(20.0), 0, module=LAYER, severity="warning", bare=True,
        says=("activations grow 1.33 times per repetition", "limit 2^13"),
    ),
    "given_on_by_its_last_child": Sample(
        given_on_by_its_last_child, 0, module=LAYER, severity="warning", bare=True, says=("activations grow",)
    ),
    "gradients_of_a_recurrence": Sample(
        lambda: recurrence(26.0, "backward"), 0, module=LAYER, severity="warning", bare=True,
        says=("gradients grow", "limit 2^24"),
    ),
}  # fmt: skip
HEALTHY = {
    f.__name__: f
    for f in (
        a_steady_cell,
        a_residual_stream,
        a_stream_of_normed_branches,
        level_gradients,
        a_few_layers_without_a_norm,
        a_sum,
        one_large_layer,
        near_the_end_of_fp16_but_level,
        frequencies,
        a_child_of_sines,
        a_recurrence_with_clipped_gradients,
        a_recurrence_that_settles,
        few_repetitions,
    )
}
