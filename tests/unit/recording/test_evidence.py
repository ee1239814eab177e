"""Which recorded numbers give reason for a deep scan."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precdoctor.recording.output.evidence import Evidence, Readings, Watcher


def rows(amax: float, zeros: float = 0.0, kind: str = "output", dtype: str = "float16", slot: int = 3) -> Readings:
    return Readings(
        np.array([slot]), np.array([kind]), np.array([dtype]), np.array([amax]), np.array([zeros]), np.array([64])
    )


def watch(series: list[Readings], scales: list[float] | None = None) -> list[Evidence]:
    watcher = Watcher()
    return [e for i, r in enumerate(series) for e in watcher.of_rows(i, r, scales[i] if scales is not None else None)]


def steps(**columns: list[float | None]) -> list[Evidence]:
    watcher, count = Watcher(), len(next(iter(columns.values())))
    return [
        e for i in range(count) for e in watcher.of_step({"step": i, **{name: v[i] for name, v in columns.items()}})
    ]


def told(found: list[Evidence]) -> list[tuple[str, int]]:
    return [(e.what, e.step) for e in found]


@pytest.mark.parametrize(("dtype", "limit"), [("float16", 256.0), ("bfloat16", 2.0**64)])
def test_squares_that_would_overflow_are_evidence_the_first_time(dtype, limit):
    below = [rows(limit / 1.1, dtype=dtype)] * 5
    found = watch([*below, *[rows(limit * 1.1, dtype=dtype)] * 3, *below, rows(limit * 1.1, dtype=dtype)])
    assert told(found) == [("squares", 5)]
    assert found[0].before == pytest.approx(limit / 1.1)
    assert watch([*[rows(limit / 1.1, dtype="float32")] * 5, rows(limit * 1.1, dtype="float32")]) == []


@pytest.mark.parametrize(("jump", "is_evidence"), [(4.0, False), (16.0, True), (1 / 4.0, False), (1 / 16.0, True)])
def test_an_amax_that_leaves_its_range_by_three_binades_is_evidence(jump, is_evidence):
    found = watch([*[rows(1.0, dtype="float32")] * 6, rows(jump, dtype="float32")])
    assert told(found) == ([("amax", 6)] if is_evidence else [])


def test_a_range_that_moves_slowly_is_none():
    assert watch([rows(1.05**i, dtype="float32") for i in range(200)]) == []


def test_gradients_are_measured_without_the_loss_scale():
    series = [rows(65536.0 * 1e-3, kind="weight_grad", dtype="float32")] * 6
    series += [rows(16.0 * 1e-3, kind="weight_grad", dtype="float32")] * 6
    assert watch(series, [65536.0] * 6 + [16.0] * 6) == []


def test_zeros_that_come_are_evidence_and_zeros_from_the_start_are_not():
    assert told(watch([*[rows(1.0, 0.5)] * 6, rows(1.0, 0.8)])) == [("zeros", 6)]
    assert watch([*[rows(0.0, 1.0)] * 3, *[rows(1.0, 0.0)] * 3, rows(1.0, 1.0)]) == []


def test_headroom_that_ends_is_evidence():
    assert told(watch([*[rows(3e4)] * 5, rows(4e4)])) == [("headroom", 5)]


def test_a_rate_that_jumps_is_evidence_and_neither_warm_up_nor_restart_is():
    assert told(steps(lr=[1e-3] * 8 + [1.0] * 3)) == [("learning-rate", 8)]
    assert steps(lr=[1e-3 * i / 10 for i in range(10)]) == []
    assert steps(lr=[1e-3 * (1 + math.cos(i)) for i in range(50)]) == []


def test_losses_and_norms_that_jump_are_evidence():
    noise = [2.0 + 0.1 * (i % 5) for i in range(20)]
    assert told(steps(loss=[*noise, 9.0])) == [("loss", 20)]
    assert steps(loss=[*noise, 2.6]) == []
    assert told(steps(grad_norm=[*noise, 30.0])) == [("grad-norm", 20)]


def clipped(
    norms: list[float], *, dtype: str = "float16", clip: float | None = 1.0, **facts: Any
) -> list[tuple[str, int]]:
    watcher = Watcher()
    watcher.of_rows(0, rows(1.0, kind="weight_grad", dtype=dtype), None)
    steps = ({"step": i, "grad_norm": n, "clip_norm": clip, **facts} for i, n in enumerate(norms))
    return told([e for row in steps for e in watcher.of_step(row)])


def test_a_norm_beyond_fp16_is_evidence_once_where_fp16_gradients_are_clipped():
    norms = [40_000.0, 60_000.0, 70_000.0, 90_000.0]
    assert clipped(norms) == [("clipped-norm", 2)]
    assert clipped(norms, dtype="float32") == clipped(norms, clip=None) == clipped(norms[:2]) == []


@pytest.mark.parametrize("sampled", [True, False])
def test_the_norm_that_is_clipped_has_the_loss_scale_only_before_it_is_taken_out(sampled):
    norms, scaled = [20.0, 40.0, 70.0], {"loss_scale": 1024.0, "sampled": sampled}
    assert clipped(norms, **scaled, clipped_before_unscale=False) == clipped(norms, **scaled) == []
    assert clipped(norms, **scaled, clipped_before_unscale=True) == [("clipped-norm", 2)]


def test_a_scale_is_evidence_after_three_falls_or_below_where_it_held():
    assert told(steps(loss_scale=[2.0**16, 2.0**15, 2.0**14, 2.0**13, 2.0**12])) == [("loss-scale", 3)]
    held = [1024.0] * 12
    assert steps(loss_scale=[*held, 2048.0, 1024.0, *held]) == []
    assert told(steps(loss_scale=[*held, 512.0, *held])) == [("loss-scale", 12)]


numbers = st.one_of(st.none(), st.floats())
any_rows = st.lists(
    st.tuples(
        st.integers(0, 40),
        st.sampled_from(["input", "output", "weight_grad", "update", "weight", "odd"]),
        st.sampled_from(["float16", "bfloat16", "float32", "complex64", ""]),
        st.floats(),
        st.floats(),
        st.integers(0, 2**40),
    ),
    max_size=6,
    unique_by=lambda row: row[0],
)


@settings(deadline=None)
@given(st.lists(st.tuples(any_rows, numbers, numbers, numbers, numbers, st.text(max_size=2)), max_size=40))
def test_it_never_raises_and_what_it_remembers_is_bounded(run):
    watcher = Watcher()
    for step, (tensors, scale, loss, norm, lr, optimizer) in enumerate(run):
        slots, kinds, dtypes, amax, zeros, numel = zip(*tensors, strict=True) if tensors else ((),) * 6
        readings = Readings(
            np.array(slots, np.int64),
            np.array(kinds, np.str_),
            np.array(dtypes, np.str_),
            np.array(amax, np.float64),
            np.array(zeros, np.float64),
            np.array(numel, np.int64),
        )
        assert len(watcher.of_rows(step, readings, scale)) <= 4
        row = {"step": step, "optimizer": optimizer, "loss": loss, "grad_norm": norm, "lr": lr, "loss_scale": scale}
        assert len(watcher.of_step(row)) <= 4
    assert len(watcher._seen) <= 2 * 41
    assert len(watcher._optimizers) <= 16
    assert all(len(n.losses) <= 16 and len(n.norms) <= 16 for n in watcher._optimizers.values())
