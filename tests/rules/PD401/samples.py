"""FP8 tensors at their maximum."""

from collections.abc import Callable

import numpy as np

from tests.support.fp8 import Floats, delayed, draws, in_fp8
from tests.support.samples import Sample
from tests.support.training import Training, find, tensor

E4M3 = {"dtype": "float8_e4m3fn", "numel": 4096, "amax": 448.0, "amin_nonzero": 2.0**-9, "exp_lo": 5}


def with_fp8(at_max: int, source_amax: float | None = None, **columns: object) -> Training:
    """A buffer-like FP8 copy of the MLP's input, made right after it."""
    run = Training()
    for step, rows in run.tensors.items():
        at = rows.index(find(rows, "output", "blocks.0.mlp.up"))
        if source_amax is not None:
            rows[at - 1].update(amax=source_amax)
        else:
            rows[at - 1].update(numel=4000)  # no tensor of the same size: the source is not known
        for row in rows[at:]:
            row["order"] += 1
        full = {**E4M3, "exp_hist": [500, 400, 300 + at_max], "at_max": at_max, **columns}
        rows.insert(at, tensor(step, "input", "blocks.0.mlp.up", at, **full))
    return run


def no_scale() -> Training:
    return with_fp8(600, source_amax=3000.0)


def stale_scale() -> Training:
    return with_fp8(200)


def counted_at_the_cast() -> Training:
    return with_fp8(100, saturated=82, format="E4M3FN", flushed=0, scale=2.0)


def with_cast(clipped: int | None, **columns: object) -> Training:
    """The MLP's input as it lies before an observed cast to E4M3."""
    run = Training()
    full = {
        "dtype": "bfloat16",
        "numel": 4096,
        "amin_nonzero": 2.0**-9,
        "exp_lo": 5,
        "exp_hist": [500, 400, 300, 100, 60, 40],
    }
    full |= {"format": "float8_e4m3fn", "flushed": 0, "saturated": clipped, "scale": 64.0, **columns}
    for step, rows in run.tensors.items():
        at = rows.index(find(rows, "output", "blocks.0.mlp.up"))
        for row in rows[at:]:
            row["order"] += 1
        rows.insert(at, tensor(step, "fp8_operand", "blocks.0.mlp.up", at, name="input", **full))
    return run


def clipped_casts() -> Training:
    return with_cast(100, amax=1792.0)


def clipped_outside_of_modules() -> Training:
    """A script that casts by hand, before it hands the tensor to a module."""
    run = clipped_casts()
    return run.change(
        lambda r: r.update(root="", module="", module_class=None, name="cast.2", scale=None), kind="fp8_operand"
    )


def casts_that_fit() -> Training:
    return with_cast(0, amax=448.0)


def cast_that_may_hide_clipping() -> Training:
    """Clamped where nobody saw it: nothing is claimed of such a row."""
    return with_cast(None, amax=448.0)


def wrong_margin() -> Training:
    """Delayed scaling with its margin the wrong way round: always too large, never stale."""
    return in_fp8(24, {("blocks.0.mlp.up", "input"): delayed(draws(6), 8, margin=-2)})


def growing(step: int) -> Floats:
    return 1.3**step * draws(7)(step)


def held(draw: Callable[[int], Floats], interval: int = 8) -> Callable[[int], tuple[Floats, float]]:
    """Casts at a scale that is computed anew on every ``interval``-th step only, from what was seen since."""

    def cast(step: int) -> tuple[Floats, float]:
        newest = step - step % interval
        seen = [float(np.abs(draw(s)).max()) for s in range(max(0, newest - interval + 1), newest + 1)]
        return draw(step), 448.0 / max(seen)

    return cast


def held_scale() -> Training:
    """Too large on most steps, right again on every eighth."""
    return in_fp8(58, {("blocks.0.mlp.up", "input"): held(growing)})


def held_scale_of_steady_data() -> Training:
    return in_fp8(58, {("blocks.0.mlp.up", "input"): held(draws(7))})


def amax_scaling_per_tile() -> Training:
    """One element of each 1x128 tile is at the maximum."""
    return with_fp8(32)


def cast_clips_nothing() -> Training:
    """Many at the maximum, none clipped: the exact count decides."""
    return with_fp8(400, saturated=0, format="E4M3FN", flushed=0)


def tiny_tensor() -> Training:
    return with_fp8(60, numel=128)


def once() -> Training:
    run = with_fp8(10)
    find(run.tensors[4], "input", "blocks.0.mlp.up").update(at_max=900)
    return run


FIRING = {
    "held_scale": Sample(
        held_scale,
        module="blocks.0.mlp.up",
        kind="fp8_operand",
        severity="warning",
        says=("input of `blocks.0.mlp.up`",),
    ),
    "wrong_margin": Sample(
        wrong_margin, module="blocks.0.mlp.up", kind="fp8_operand", says=("25 %", "times the scale")
    ),
    "no_scale": Sample(no_scale, module="blocks.0.mlp.up", kind="input", says=("15 %", "448", "limit 2 %")),
    "stale_scale": Sample(stale_scale, module="blocks.0.mlp.up", severity="warning", says=("4.9 %",)),
    "clipped_casts": Sample(
        clipped_casts,
        module="blocks.0.mlp.up",
        kind="fp8_operand",
        severity="warning",
        says=("input of `blocks.0.mlp.up`", "float8_e4m3fn", "2.4 %"),
    ),
    "clipped_outside_of_modules": Sample(
        clipped_outside_of_modules,
        module="",
        kind="fp8_operand",
        severity="warning",
        says=("the FP8 operand `cast.2` outside of modules is clipped", "at a scale that is not in the log"),
    ),
    "counted_at_the_cast": Sample(counted_at_the_cast, severity="warning", says=("clipped", "2 %", "limit 0.5 %")),
}
_QUIET = (
    amax_scaling_per_tile,
    cast_clips_nothing,
    tiny_tensor,
    once,
    casts_that_fit,
    cast_that_may_hide_clipping,
    held_scale_of_steady_data,
)
HEALTHY = {f.__name__: f for f in _QUIET}
