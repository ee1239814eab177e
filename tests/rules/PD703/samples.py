"""Positions in half precision: tables of them, and sines."""

from typing import Any

import numpy as np

from tests.support.samples import Sample
from tests.support.scanning import fact, scanned
from tests.support.training import ROOT, Training, histogram, tensor


def table(name: str, values: np.ndarray, dtype: str = "bfloat16", length: int = 512) -> Training:
    """A buffer of this name, and activations of ``length`` positions."""
    run = Training().change(lambda r: r.update(shape=[2, length, 4]), kind="output")
    columns = histogram(values) | {"dtype": dtype, "name": name, "shape": list(values.shape)}
    run.tensors[0].append(tensor(0, "buffer", "rotary", len(run.tensors[0]), **columns))
    return run


def op(name: str, inputs: str, outputs: str, amax: float, numel: int = 512) -> dict[str, Any]:
    """An op as a scan's coverage tells it, of the forward pass, called twice."""
    dtypes = {"phase": "forward", "inputs": inputs, "outputs": outputs, "file": "dit.py", "line": 15}
    return {"op": f"aten.{name}", **dtypes, "calls": 2, "numel": 2 * numel, "amax": amax}


def sines(*ops: dict[str, Any]) -> Training:
    """The sines of a time embedding."""
    return scanned({"root": ROOT, "module": "time", "data": {"kind": "coverage", "ops": list(ops)}})


def in_half(amax: float, dtype: str = "bfloat16") -> Training:
    """Angles are a product in half precision, sines are taken of it."""
    return sines(op("mul.Tensor", dtype, dtype, amax), op("cos.default", dtype, dtype, 1.0))


def widened(amax: float, *, of_positions: float | None = None, frequencies: float = 1.0) -> Training:
    """32 positions come in BF16, angles are a product in FP64 of them, or of others."""
    angles = (of_positions or amax) * frequencies
    return sines(
        op("_to_copy.default", "bfloat16", "float64", amax, 32),
        op("mul.Tensor", "float64", "float64", angles),
        op("cos.default", "float64", "float64", 1.0),
        op("sin.default", "float64", "float64", 1.0),
    )


def measured(error: float, *steps: int, wrong: int = 100) -> Training:
    """Fourier features of coordinates that the script casts to BF16."""
    told = {"error": error, "wrong": wrong, "of": 1000, "largest": 201.0, "rounded_to": "bfloat16"}
    return scanned(fact("angle", "sin.default", module="time", **told), steps=steps or (0, 1))


def a_few_large_coordinates() -> Training:
    return measured(0.4, wrong=5)


def one_scan_alone() -> Training:
    return measured(0.4, 0)


def coordinates_in_fp16() -> Training:
    return measured(0.1)


FREQUENCIES = 10000.0 ** -np.linspace(0, 1, 8)


def short_sequences() -> Training:
    return table("inv_freq", FREQUENCIES, length=16)


def in_fp32() -> Training:
    return table("inv_freq", FREQUENCIES, "float32")


def widened_again(dtype: str = "bfloat16") -> Training:
    """FP32 in name: the model was converted, and this buffer back."""
    return table("inv_freq", rounded(FREQUENCIES, dtype), "float32", length=4096)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """To the significant bits of the format."""
    bits = {"bfloat16": 8, "float16": 11}[dtype]
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.round(mantissa * 2.0**bits), exponent - bits)


def bands() -> Training:
    """Of few bits by themselves: eighths up to one."""
    return table("freqs", np.arange(1.0, 9.0) / 8.0, "float32", length=4096)


def another_buffer() -> Training:
    """Means of a batch norm have nothing to do with positions."""
    return table("running_mean", np.linspace(0, 900, 64))


def features_of_coordinates() -> Training:
    """Powers of two, for coordinates between -1 and 1."""
    return table("freqs", 2.0 ** np.arange(6))


def few_positions() -> Training:
    return table("position_ids", np.arange(200.0))


FIRING = {
    "measured": Sample(
        lambda: measured(0.4), 0, "time", severity="warning", bare=True,
        says=("angles are up to 0.4 radians off", "limit 0.25", "10 % of them"),
    ),
    "sines_in_half": Sample(
        lambda: in_half(980.0), 0, "time", severity="warning", bare=True,
        says=("up to 980 are 4 radians apart", "at dit.py:15", "off by up to 2 radians (limit 1)"),
    ),
    "sines_in_fp16": Sample(
        lambda: in_half(4000.0, "float16"), 0, "time", severity="warning", bare=True, says=("2 radians apart",),
    ),
    "sines_of_unix_times": Sample(
        lambda: in_half(1.2e7, "float32"), 0, "time", severity="warning", bare=True,
        says=("float32", "1 radians apart", "off by up to 0.5 radians (limit 0.1)"),
    ),
    "sines_of_what_was_widened": Sample(
        lambda: widened(980.0), 0, "time", severity="warning", bare=True, says=("had been rounded to bfloat16",),
    ),
    "frequencies": Sample(
        lambda: table("inv_freq", FREQUENCIES), 0, "rotary", "buffer", severity="warning", says=("1 radians",),
    ),
    "widened_again": Sample(
        widened_again, 0, "rotary", "buffer", severity="warning", says=("numbers rounded to bfloat16", "8 radians"),
    ),
    "widened_from_fp16": Sample(
        lambda: widened_again("float16"), 0, "rotary", "buffer", severity="warning", says=("rounded to float16",),
    ),
    "angles": Sample(
        lambda: table("freqs", np.outer(np.arange(1.0, 513.0), FREQUENCIES)), 0, "rotary", severity="warning",
        says=("1 radians",),
    ),
    "positions": Sample(
        lambda: table("position_ids", np.arange(1024.0)), 0, "rotary", severity="warning", says=("4 neighbouring",),
    ),
}  # fmt: skip
HEALTHY = {
    f.__name__: f
    for f in (
        a_few_large_coordinates,
        one_scan_alone,
        coordinates_in_fp16,
        short_sequences,
        in_fp32,
        bands,
        another_buffer,
        features_of_coordinates,
        few_positions,
    )
} | {
    "large_angles_in_fp32": lambda: in_half(1.5e6, "float32"),
    "unix_times_in_fp64": lambda: in_half(1.2e7, "float64"),
    "few_time_steps": lambda: in_half(250.0),
    "time_steps_in_fp16": lambda: in_half(999.0, "float16"),
    "a_network_of_sines": lambda: in_half(90.0),
    "few_time_steps_widened": lambda: widened(250.0),
    "sines_of_others": lambda: widened(300.0, of_positions=980.0),
}
