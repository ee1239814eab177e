"""FP8 casts that flush."""

import numpy as np

from precdoctor.numerics.formats import E5M2
from tests.support.fp8 import add_operand, current, draws, fill, in_fp8
from tests.support.samples import Sample
from tests.support.scanning import fact, scanned, used
from tests.support.training import NUMEL, Training, histogram, tensor

UP = "blocks.0.mlp.up"


def unscaled_gradient() -> Training:
    draw = draws(3)
    return add_operand(Training(), UP, "grad_output", lambda s: (draw(s) * 3e-5, 1.0), E5M2)


def scale_of_another_tensor() -> Training:
    """The weight's scale in front of an input that is 2^-13 of it."""
    draw = draws(4)
    return in_fp8(casts={(UP, "input"): lambda s: (draw(s) * 2.0**-13, fill(draw(s)))})


def scale_not_known() -> Training:
    """Rows scaled one by one, by a constant that is far too small."""
    draw = draws(5)
    return in_fp8(casts={(UP, "input"): lambda s: (draw(s) * 2.0**-9, None)})


def current_scaling() -> Training:
    return in_fp8()


def unscaled_of_order_one() -> Training:
    draw = draws(6)
    return in_fp8(casts={(UP, "input"): lambda s: (draw(s), 1.0)})


def relu() -> Training:
    draw = draws(7)
    return in_fp8(casts={(UP, "input"): current(lambda s: np.maximum(draw(s), 0.0))})


def softmax_probabilities() -> Training:
    """Most of them too small for the format, and too small to matter."""
    draw = draws(8)

    def probabilities(step: int) -> np.ndarray:
        exps = np.exp(4.0 * draw(step))
        return exps / exps.sum(axis=1, keepdims=True)

    return in_fp8(casts={("blocks.0.mlp.down", "input"): current(probabilities)})


def wide_gradient() -> Training:
    """Log-normal over some twenty binades: what goes weighs nothing."""
    draw = draws(9)
    wide = lambda s: np.exp(2.5 * draw(s)) * np.sign(draw(s + 1000))  # noqa: E731
    return in_fp8(casts={(UP, "grad_output"): current(wide, E5M2)})


def fresh_history() -> Training:
    """The scale is 1 on the first step, and right from then on."""
    draw = draws(10)
    small = lambda s: draw(s) * 2.0**-11  # noqa: E731
    return in_fp8(casts={(UP, "input"): lambda s: (small(s), fill(small(s)) if s else 1.0)})


def zero_gradients() -> Training:
    zero = lambda _: (np.zeros((32, 256)), 57344.0 / 1e-12)  # noqa: E731
    return in_fp8(casts={(UP, "grad_output"): zero})


def once() -> Training:
    draw = draws(11)
    return in_fp8(casts={(UP, "input"): lambda s: (draw(s) * (2.0**-13 if s == 5 else 1.0), fill(draw(s)))})


def cast_in_front(zero_share: float) -> Training:
    """A channel in each block of 32 is millions of times the others; the cast is in the module around its reader."""
    draw, down = draws(12), "blocks.0.mlp.down"
    loud = np.where(np.arange(256) % 32 == 7, 2.0**22, 1.0)
    run = add_operand(Training(), down, "cast.0", current(lambda s: draw(s) * loud))
    for step, rows in run.tensors.items():
        cast = next(r for r in rows if r["kind"] == "fp8_operand")
        cast["module"] = "blocks.0.mlp"
        left = draw(step) * np.where(loud > 1.0, loud, 0.0)
        at = next(i for i, r in enumerate(rows) if r["kind"] == "output" and r["module"] == down)
        given = {"name": "0", "dtype": "float32", "shape": [32, 256], **histogram(left)}
        assert given["zero"] == cast["zero"] + cast["flushed"]
        rows.insert(at, tensor(step, "input", down, None, **given))
    zero = int(zero_share * NUMEL)
    return run.change(lambda r: r.update(zero=zero), kind="weight_grad", module=down)


def channels_lost_in_front() -> Training:
    return cast_in_front(248 / 256)


def no_channel_lost_in_front() -> Training:
    return cast_in_front(0.0)


def scanned_channels(effect: float, channels: float = 0.9, flushed: int = 0) -> Training:
    """No channel is lost whole; a deep scan has compared them one by one, and followed what was flushed."""
    run = cast_in_front(0.0)
    found = fact(
        "cast", "_to_copy.default", module="blocks.0.mlp", to="float8_e4m3fn", numel=32 * 256,
        channels=channels, flushed=flushed, nonzero=32 * 256, effect=effect, fed=used("addmm.default"),
    )  # fmt: skip
    run.events = scanned(found).events
    return run


def flushed_that_add_nothing() -> Training:
    return scanned_channels(0.01, channels=0.0, flushed=4096)


def channels_that_add_nothing() -> Training:
    return scanned_channels(0.01)


FIRING = {
    "scanned_channels": Sample(
        lambda: scanned_channels(0.3), module="blocks.0.mlp", kind="fp8_operand", severity="error",
        says=("90 % of its channels keep less signal than error", "30 % of the result of addmm"),
    ),
    "scanned_elements": Sample(
        lambda: scanned_channels(0.3, channels=0.1, flushed=4096), module="blocks.0.mlp", severity="error",
        says=("50 % of its elements are flushed", "30 % of the result of addmm"),
    ),
    "channels_lost_in_front": Sample(
        channels_lost_in_front, module="blocks.0.mlp", kind="fp8_operand", severity="error",
        says=("`cast.0` of `blocks.0.mlp`", "the weight of `blocks.0.mlp.down` is exactly zero"),
    ),
    "unscaled_gradient": Sample(
        unscaled_gradient, module=UP, kind="fp8_operand", severity="warning",
        says=("output gradient of `blocks.0.mlp.up`", "E5M2", "limit 4 %"),
    ),
    "scale_of_another_tensor": Sample(
        scale_of_another_tensor, module=UP, severity="warning", says=("input of", "E4M3FN", "dB")
    ),
    "scale_not_known": Sample(scale_not_known, module=UP, severity="warning", says=("a scale that is not in the log",)),
}  # fmt: skip
HEALTHY = {
    f.__name__: f
    for f in (
        current_scaling, unscaled_of_order_one, relu, softmax_probabilities, wide_gradient, fresh_history,
        zero_gradients, once, no_channel_lost_in_front, channels_that_add_nothing, flushed_that_add_nothing,
    )
}  # fmt: skip
