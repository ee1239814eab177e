"""Tables of positions in half precision."""

import numpy as np

from tests.support.samples import Sample
from tests.support.training import Training, histogram, tensor


def table(name: str, values: np.ndarray, dtype: str = "bfloat16", length: int = 512) -> Training:
    """A buffer of this name, and activations of ``length`` positions."""
    run = Training().change(lambda r: r.update(shape=[2, length, 4]), kind="output")
    columns = histogram(values) | {"dtype": dtype, "name": name, "shape": list(values.shape)}
    run.tensors[0].append(tensor(0, "buffer", "rotary", len(run.tensors[0]), **columns))
    return run


FREQUENCIES = 10000.0 ** -np.linspace(0, 1, 8)


def short_sequences() -> Training:
    return table("inv_freq", FREQUENCIES, length=16)


def in_fp32() -> Training:
    return table("inv_freq", FREQUENCIES, "float32")


def another_buffer() -> Training:
    """Means of a batch norm have nothing to do with positions."""
    return table("running_mean", np.linspace(0, 900, 64))


def features_of_coordinates() -> Training:
    """Powers of two, for coordinates between -1 and 1."""
    return table("freqs", 2.0 ** np.arange(6))


def few_positions() -> Training:
    return table("position_ids", np.arange(200.0))


FIRING = {
    "frequencies": Sample(
        lambda: table("inv_freq", FREQUENCIES), 0, "rotary", "buffer", severity="warning", says=("1 radians",),
    ),
    "angles": Sample(
        lambda: table("freqs", np.outer(np.arange(1.0, 513.0), FREQUENCIES)), 0, "rotary", severity="warning",
        says=("1 radians",),
    ),
    "positions": Sample(
        lambda: table("position_ids", np.arange(1024.0)), 0, "rotary", severity="warning", says=("4 neighbouring",),
    ),
}  # fmt: skip
HEALTHY = {f.__name__: f for f in (short_sequences, in_fp32, another_buffer, features_of_coordinates, few_positions)}
