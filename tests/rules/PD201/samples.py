"""Gradients rounded to zero, and gradients that were zero anyway."""

from collections.abc import Callable

import numpy as np

from tests.support.samples import Sample
from tests.support.training import Row, Training, histogram

N = 40_000


def gradients(
    values: Callable[[np.random.Generator], np.ndarray], dtype: str = "float16", **options: object
) -> Training:
    """Every output gradient of the MLP's first layer is a fresh draw, cast to FP16."""
    run = Training(dtype=dtype, **options)  # type: ignore[arg-type]
    rng = np.random.default_rng(1)

    def redraw(row: Row) -> None:
        stored = values(rng).astype(np.float16)
        tiny = (np.abs(stored) > 0) & (np.abs(stored) < 2.0**-14)
        row.update(histogram(stored), subnormal=int(tiny.sum()))

    return run.change(redraw, kind="grad_output", module="blocks.0.mlp.up")


def no_scaler() -> Training:
    """Half of it behind a ReLU, the rest too small: sigma 5e-8 against a flush limit of 3e-8."""
    return gradients(lambda rng: rng.normal(0, 5e-8, N) * (rng.random(N) < 0.5))


def scale_too_low() -> Training:
    return gradients(lambda rng: rng.normal(0, 2e-7, N), scale=64.0)


def dies_upstream() -> Training:
    """Behind the dying gradient nothing is left."""
    run = no_scaler()
    nothing = histogram(np.zeros(N, np.float16)) | {"exp_lo": None, "exp_hist": None}
    return run.change(lambda r: r.update(nothing), kind="grad_output", module="blocks.0.attn.proj")


def flushed_whole() -> Training:
    """What is left is faint, if not cut off; behind it nothing is left at all."""
    run = gradients(lambda rng: rng.choice([1.0, -1.0], N) * rng.uniform(2e-7, 2e-6, N), scale=2.0**-14)
    nothing = histogram(np.zeros(N, np.float16)) | {"exp_lo": None, "exp_hist": None}
    return run.change(lambda r: r.update(nothing), kind="grad_output", module="blocks.0.attn.proj")


def vanishes_at_once() -> Training:
    """A twentieth is flushed at first, and nothing is left one step further."""
    run = gradients(lambda rng: rng.normal(0, 4e-7, N))
    nothing = histogram(np.zeros(N, np.float16)) | {"exp_lo": None, "exp_hist": None}
    return run.change(lambda r: r.update(nothing), kind="grad_output", module="blocks.0.attn.proj")


def relu_zeros() -> Training:
    return gradients(lambda rng: rng.normal(0, 1e-3, N) * (rng.random(N) < 0.1))


def dropout_and_padding() -> Training:
    return gradients(lambda rng: np.where(np.arange(N) < N // 2, 0.0, rng.normal(0, 1e-2, N) * (rng.random(N) < 0.9)))


def confident_classifier() -> Training:
    """A few large elements carry everything; the rest underflows and does not matter."""
    return gradients(lambda rng: np.where(np.arange(N) < 400, rng.normal(0, 0.1, N), rng.normal(0, 2e-8, N)))


def loud_channel() -> Training:
    """The same exponents, but the weight gradient has half of its elements missing: what is gone is whole channels."""
    half = np.random.default_rng(5).normal(0, 1e-2, N) * (np.arange(N) % 2)
    return confident_classifier().change(
        lambda r: r.update(histogram(half.astype(np.float32))), kind="weight_grad", module="blocks.0.mlp.up"
    )


def zero_initialised() -> Training:
    return gradients(lambda rng: np.zeros(N))


def a_little_underflow() -> Training:
    """One percent flushed: a quarter of the twentieth that is small."""
    return gradients(lambda rng: np.where(np.arange(N) < N // 20, rng.normal(0, 1e-7, N), rng.normal(0, 1e-3, N)))


def float32_gradients() -> Training:
    """Tiny, and FP32 does not mind."""
    run = Training()
    small = histogram(np.random.default_rng(0).normal(0, 1e-9, N).astype(np.float32))
    return run.change(lambda r: r.update(small), kind="grad_output", module="blocks.0.mlp.up")


def bfloat16_gradients() -> Training:
    run = Training(dtype="bfloat16")
    small = histogram(np.random.default_rng(0).normal(0, 1e-9, N).astype(np.float32))
    return run.change(lambda r: r.update(small), kind="grad_output", module="blocks.0.mlp.up")


def only_the_last_step() -> Training:
    """Once is not the median."""
    run = Training(dtype="float16")
    bad = no_scaler().tensors[11]
    run.tensors[11] = bad
    return run


FIRING = {
    "no_scaler": Sample(
        no_scaler, module="blocks.0.mlp.up", kind="grad_output", says=("limit 4 %", "float16", "Loss scale: 1")
    ),
    "scale_too_low": Sample(
        scale_too_low, module="blocks.0.mlp.up", kind="grad_output", severity="warning", says=("Loss scale: 64",)
    ),
    "flushed_whole": Sample(flushed_whole, module="blocks.0.attn.proj", says=("No element survived",)),
    "loud_channel": Sample(
        loud_channel, module="blocks.0.mlp.up", says=("of the module's weight gradient exactly zero",)
    ),
    "vanishes_at_once": Sample(
        vanishes_at_once, module="blocks.0.attn.proj", severity="error", says=("Rounding to float16 set 100 %",)
    ),
    "dies_upstream": Sample(dies_upstream, module="blocks.0.mlp.up", says=("2 gradients of 8 above",)),
}
HEALTHY = {
    f.__name__: f
    for f in (
        relu_zeros, dropout_and_padding, confident_classifier, zero_initialised, a_little_underflow, float32_gradients,
        bfloat16_gradients, only_the_last_step,
    )
}  # fmt: skip
