"""Weight gradients that FP16 flushed, and zeros that were always there."""

from tests.support.samples import Sample
from tests.support.training import Training, normal


def gradients(sigma: float, *, zeros: int = 0) -> Training:
    """The gradient of the head's weight, computed in FP16, with so many zeros besides."""
    columns = normal(sigma, "float16") | {"dtype": "float16"}
    columns["zero"] += zeros
    columns["numel"] += zeros
    return Training().change(lambda r: r.update(columns), kind="weight_grad", module="head")


def widened() -> Training:
    """FP32 in the log, but computed under FP16 autocast: no element below 2^-24."""
    run = gradients(4e-8)
    for row in run.step_rows.values():
        row["autocast_dtype"] = "float16"
    return run.change(lambda r: r.update(dtype="float32"), kind="weight_grad", module="head")


def made_in_fp32() -> Training:
    """As small, but FP32 holds it."""
    run = Training()
    for row in run.step_rows.values():
        row["autocast_dtype"] = "float16"
    return run.change(lambda r: r.update(normal(4e-8)), kind="weight_grad", module="head")


def unused_rows() -> Training:
    return gradients(1e-3, zeros=40000)


def subnormal_but_there() -> Training:
    return gradients(2e-5)


FIRING = {
    "half_flushed": Sample(lambda: gradients(4e-8), module="head", kind="weight_grad", says=("limit 4 %", "FP16")),
    "widened": Sample(widened, module="head", kind="weight_grad"),
    "a_tenth": Sample(lambda: gradients(2.5e-7, zeros=900), module="head", severity="warning", says=("other reasons",)),
}
HEALTHY = {f.__name__: f for f in (made_in_fp32, unused_rows, subnormal_but_there)}
