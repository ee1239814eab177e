"""Variances as differences of moments."""

from typing import Any

from tests.support.samples import Sample
from tests.support.scanning import fact, scanned, used, with_scans
from tests.support.training import Training


def difference(**changes: Any) -> dict[str, Any]:
    measured = {"dtype": "float32", "bits_lost": 24.7, "wrong": 250, "of": 256, "seen": 300.0, "exact": 0.05}
    return fact("cancellation", "sub.Tensor", **{**measured, "used_by": used("rsqrt.default"), **changes})


def bits_left() -> Training:
    return scanned(difference(bits_lost=12.0))


def constant_rows() -> Training:
    return scanned(difference(wrong=40))


def next_to_nothing() -> Training:
    """What is wrong is added to much larger numbers."""
    return scanned(difference(effect=1e-3, fed=used("add.Tensor")))


def log_ratio(**changes: Any) -> dict[str, Any]:
    """Log-probabilities of two policies, cast to BF16 and then subtracted."""
    measured = {"dtype": "bfloat16", "bits_lost": 9.6, "wrong": 120, "of": 128, "zeros": 90, "seen": 0.0,
                "exact": -0.006, "rounded_before": True, "phase": "loss"}  # fmt: skip
    found = fact("cancellation", "sub.Tensor", **{**measured, **changes})
    return {**found, "root": "", "module": ""}


def interval(**changes: Any) -> dict[str, Any]:
    """Time stamps in BF16: the intervals between them are a quarter noise, few of them off by half."""
    measured = {"of_data": True, "noise": 0.25, "wrong": 20, "of": 128, "zeros": 9, "bits_lost": 8.5}
    return log_ratio(**{**measured, **changes})


def window_means(**changes: Any) -> dict[str, Any]:
    """Window means of activations by a running sum, which reaches 700 and has steps of 4 there."""
    measured = {"dtype": "bfloat16", "wrong": 5995, "of": 12190, "noise": 0.18, "largest": 700.0, "seen": 16.0,
                "exact": 13.15, "rounded_before": True, "running_sum": True}  # fmt: skip
    return fact("cancellation", "sub.Tensor", **{**measured, **changes})


def wide_windows() -> Training:
    return scanned(window_means(noise=0.06, wrong=900, effect=0.02, fed=used("addmm.default")))


def windows_that_hardly_matter() -> Training:
    return scanned(window_means(effect=0.003, fed=used("addmm.default")))


def windows_of_one_scan() -> Training:
    return with_scans(scanned(window_means(), steps=(0,)), 1, 8)


def gaps(**changes: Any) -> dict[str, Any]:
    """Unix times that the script made FP32 before any scan: the gaps between them are 128 seconds or none."""
    measured = {"dtype": "float32", "wrong": 440, "of": 448, "zeros": 412, "ulp": 128.0, "largest": 1.71e9,
                "rounded_before": True}  # fmt: skip
    return fact("cancellation", "sub.Tensor", **{**measured, **changes})


def long_gaps() -> Training:
    return scanned(gaps(wrong=200))


def near_pairs(**changes: Any) -> dict[str, Any]:
    """Expanded distances of places far from zero: each row has a near one, and that one is wrong."""
    measured = {"dtype": "float32", "of_data": False, "wrong": 6, "of": 128, "zeros": 6, "bits_lost": 23.0, "rows": 8,
                "rows_wrong": 6, "effect": 0.3, "fed": used("mm.default")}  # fmt: skip
    return log_ratio(**{**measured, **changes})


def a_near_pair() -> Training:
    """One row of eight alone has one."""
    return scanned(near_pairs(wrong=1, rows_wrong=1))


def near_pairs_do_nothing() -> Training:
    return scanned(near_pairs(effect=0.01))


def rounded_a_little() -> Training:
    return scanned(interval(noise=0.1))


def few_and_weak() -> Training:
    """One channel in eight, which hardly matters to the next result."""
    return scanned(difference(wrong=32, effect=0.01, fed=used("addmm.default")))


def near_the_targets() -> Training:
    """Late in the run predictions come close."""
    return with_scans(scanned(log_ratio(), steps=(7, 8)), 0, 1, 2, 3)


FIRING = {
    "window_means": Sample(
        lambda: scanned(window_means(effect=0.04, fed=used("addmm.default"))), 0, "blocks.0.attn", severity="warning",
        says=("is 18 % noise: bfloat16 holds the sums, up to 700", "5,995 of 12,190", "4 % of the result of addmm"),
    ),
    "interval": Sample(
        lambda: scanned(interval()), 0, severity="warning",
        says=("is bfloat16 25 % noise", "error of all is 25 % of them (L2, limit 12 %)"),
    ),
    "gaps": Sample(
        lambda: scanned(gaps()), 0, "blocks.0.attn", severity="warning",
        says=("numbers near 1.71e+09 are 128 apart", "440 of 448 differences (98 %, limit 50 %)", "412 of them zero"),
    ),
    "near_pairs": Sample(
        lambda: scanned(near_pairs()), 0, severity="warning",
        says=("6 of 128", "in 75 % of the rows, limit 50 %", "30 % of the result of mm"),
    ),
    "one_channel": Sample(
        lambda: scanned(difference(wrong=32, effect=0.3, fed=used("addmm.default"))), 0, "blocks.0.attn",
        severity="warning", says=("32 of 256", "30 % of the result of addmm"),
    ),
    "log_ratio": Sample(
        lambda: scanned(log_ratio()), 0, severity="warning",
        says=("a difference in the loss code", "120 of 128", "90 are exactly zero"),
    ),
    "float32": Sample(
        lambda: scanned(difference()), 0, "blocks.0.attn", severity="warning",
        says=("24 of 24 bits", "98 %", "300 where FP64 gives 0.05"),
    ),
    "bfloat16": Sample(
        lambda: scanned(difference(dtype="bfloat16", bits_lost=6.0)), 0, severity="warning", says=("6 of 8 bits",),
    ),
}  # fmt: skip
HEALTHY = {
    f.__name__: f
    for f in (
        bits_left,
        constant_rows,
        next_to_nothing,
        near_the_targets,
        rounded_a_little,
        few_and_weak,
        a_near_pair,
        near_pairs_do_nothing,
        long_gaps,
        wide_windows,
        windows_that_hardly_matter,
        windows_of_one_scan,
    )
}
