"""Two runs side by side: the first bit that differs, what moved, renamed modules, losses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precdoctor.cli import main
from precdoctor.comparison.compare import Comparison, compare
from precdoctor.comparison.drift import distances
from precdoctor.comparison.gate import gate
from precdoctor.comparison.lines import phase_of
from precdoctor.diagnosis.claims.finding import Phase, Status
from precdoctor.errors import IncomparableRunsError
from precdoctor.numerics.histogram import ExponentHistogram, Histograms
from precdoctor.runlog import Run, open_run
from tests.support.counted import Counted
from tests.support.training import FACTS, Row, Training, histogram


def fingerprinted(training: Training) -> Training:
    """A fingerprint that follows from what the row is: equal rows of two trainings have equal ones."""

    def give(row: Row) -> None:
        text = f"{row['step']} {row['module']} {row['kind']} {row.get('name')}"
        row["fingerprint"] = sum(ord(c) << (i % 50) for i, c in enumerate(text)) + (1 << 63)

    return training.change(give)


@pytest.fixture
def against(tmp_path: Path) -> Callable[..., Comparison]:
    """Compares an untouched training with one that was changed."""

    def run(change: Callable[[Training], object], **options: object) -> Comparison:
        a, b = fingerprinted(Training(steps=8)), fingerprinted(Training(steps=8))
        change(b)
        return compare(a.write(tmp_path / "a"), b.write(tmp_path / "b"), **options)  # type: ignore[arg-type]

    return run


def test_equal_runs_are_equal_in_every_bit(against: Callable[..., Comparison]) -> None:
    found = against(lambda b: None)
    assert found.bits.first is None and found.bits.compared > 100 and found.bits.steps == 8
    assert found.first_to_move == () and found.loss_differs_at is None
    assert found.diagnosis.findings == () and found.diagnosis.verdict == "clean"


def test_a_tensor_s_kind_says_when_in_a_step_it_is_made() -> None:
    expected = {"batch": "data", "input": "forward", "output": "forward", "loss": "loss"}
    expected |= {"grad_output": "backward", "weight_grad": "backward"}
    expected |= {"weight": "optimizer", "weight_grad_step": "optimizer", "update": "optimizer"}
    assert {kind: phase_of(kind).value for kind in expected} == expected


def test_the_first_difference_is_the_first_in_execution_order(against: Callable[..., Comparison]) -> None:
    def change(b: Training) -> None:
        def other(row: Row) -> None:
            row["fingerprint"] ^= 1  # the lowest of 64 bits, beside nulls elsewhere in the column

        b.change(other, step=5, module="norm", kind="output")
        b.change(other, step=5, module="head")
        b.change(other, step=6)
        b.change(lambda r: r.update(fingerprint=None), step=2, module="head", kind="output")

    found = against(change)
    first = found.bits.first
    assert first is not None
    assert replace(first, equal=1).sentence.startswith("1 tensor before it is equal in every bit; ")
    assert "equal in every bit" not in replace(first, equal=0).sentence
    assert first is not None
    assert (first.step, first.key[1], first.key[2], first.phase) == (5, "norm", "output", Phase.FORWARD)
    assert first.last_equal_step == 4 and first.equal > 100
    assert "this module (or functional code before it)" in first.meaning
    [finding] = found.diagnosis.findings
    assert (finding.code, finding.location.module, finding.location.step) == ("PD810", "norm", 5)
    assert {r.status for r in found.diagnosis.rules if r.code == "PD810"} == {Status.FAILED}


@pytest.mark.parametrize(
    ("kind", "column", "value", "meaning"),
    [
        ("update", "lr", 0.5, "the gradients are equal, and the learning rate is 0.5 instead of 0.001"),
        ("weight_grad", "loss_scale", 256.0, "the forward pass is equal, and the loss scale is 256 instead of 1024"),
        ("update", "loss_scale", 256.0, "gradients are equal and the step is not: other optimizer settings or state"),
    ],
)
def test_a_setting_that_differs_is_named_where_it_acts(
    tmp_path: Path, kind: str, column: str, value: float, meaning: str
) -> None:
    a, b = fingerprinted(Training(steps=3)), fingerprinted(Training(steps=3))
    for training in (a, b):
        for step in training.step_rows.values():
            step.update(lr=0.001, loss_scale=1024.0)
    b.step_rows[1][column] = value
    b.change(lambda row: row.update(fingerprint=row["fingerprint"] ^ 1), step=1, kind=kind)
    first = compare(a.write(tmp_path / "a"), b.write(tmp_path / "b")).bits.first
    assert first is not None and (first.step, first.key[2], first.meaning) == (1, kind, meaning)


def test_another_batch_size_is_named(against: Callable[..., Comparison]) -> None:
    def change(b: Training) -> None:
        b.change(lambda row: row.update(fingerprint=row["fingerprint"] ^ 1, shape=[2, 9]), step=0, kind="output")

    first = against(change).bits.first
    assert first is not None
    assert first.meaning == f"its shape changed from {list(first.shapes[0])} to [2, 9]"


def test_what_moved_first_is_told_from_what_moved_most(against: Callable[..., Comparison]) -> None:
    rng = np.random.default_rng(1)

    def scaled(factor: float) -> Callable[[Row], None]:
        return lambda row: row.update(histogram((factor * rng.normal(0, 1, 4096)).astype(np.float32)))

    def change(b: Training) -> None:
        for step in range(2, 8):
            b.change(scaled(2.0), step=step, module="norm", kind="output")
        for step in range(5, 8):
            b.change(scaled(64.0), step=step, module="head", kind="output")

    found = against(change)
    norm, head = found.first_to_move
    assert (norm.key[1], norm.moved_at, head.key[1], head.moved_at) == ("norm", 2, "head", 5)
    assert norm.typical == pytest.approx(1.0, abs=0.1) and norm.largest < head.largest
    assert norm.second_moment_ratio == pytest.approx(4.0, rel=0.1)


def test_a_moment_is_no_movement(against: Callable[..., Comparison]) -> None:
    far = histogram((1000 * np.random.default_rng(1).normal(0, 1, 4096)).astype(np.float32))
    found = against(lambda b: b.change(lambda r: r.update(far), step=3, module="norm", kind="output"))
    assert found.first_to_move == ()


def test_the_loss_scale_is_taken_out(tmp_path: Path) -> None:
    a = Training(steps=4).change(lambda r: r.update(scale=1.0), kind="grad_output").write(tmp_path / "a")
    scaled = histogram((1024 * np.random.default_rng(0).normal(0.0, 1.0, 4096)).astype(np.float32))
    b = Training(steps=4).change(lambda r: r.update(scaled, scale=1024.0), kind="grad_output").write(tmp_path / "b")
    drift = next(d for d in compare(a, b).drifts if d.key[2] == "grad_output")
    assert drift.typical < 0.05 and drift.amax_binades == pytest.approx(0.0, abs=1e-6)


def test_renamed_modules_are_found_by_structure(against: Callable[..., Comparison]) -> None:
    def change(b: Training) -> None:
        b.change(lambda r: r.update(module=f"wrapped.{r['module']}" if r["module"] else ""))

    found = against(change)
    assert found.paired > 20 and found.only_a == found.only_b == ()
    assert ("GPT#0.wrapped.head", "GPT#0.head") in found.renamed
    assert found.bits.first is None


def test_renames_can_be_told(against: Callable[..., Comparison]) -> None:
    def change(b: Training) -> None:
        b.change(lambda r: r.update(module=r["module"].replace("blocks.0", "h"), module_class="New"))

    found = against(change, renames=[("blocks.0", "h")])
    assert ("GPT#0.h.norm", "GPT#0.blocks.0.norm") in found.renamed
    assert found.only_a == ()


def test_another_dtype_is_a_finding(against: Callable[..., Comparison]) -> None:
    found = against(lambda b: b.change(lambda r: r.update(dtype="bfloat16"), kind="output"))
    [finding] = [f for f in found.diagnosis.findings if f.code == "PD808"]
    assert finding.location.module == "emb"
    assert "expected float32, found bfloat16" in finding.message


def test_a_failure_at_the_same_step_is_structural(tmp_path: Path) -> None:
    def bad(step: int, name: str) -> Run:
        return Training(steps=12).poison(step, "output", "head", nan=1).write(tmp_path / name)

    first, again, elsewhere = bad(7, "a"), bad(7, "b"), bad(4, "c")
    assert "structural" in compare(first, again).notes[0]
    assert "chance" in compare(first, elsewhere).notes[0]


def test_a_resumed_run_that_counts_from_0_is_told(tmp_path: Path) -> None:
    def resumed(after: int, name: str) -> Run:
        made = {**FACTS, "optimizers": [{**FACTS["optimizers"][0], "steps_before": after}]}
        return Training(steps=6, facts=made).write(tmp_path / name)

    whole, tail, same = (resumed(after, name) for after, name in ((0, "a"), (4, "b"), (4, "c")))
    assert compare(tail, same).notes == compare(whole, whole).notes == ()
    (note,) = compare(whole, tail).notes
    assert note.startswith("the second run resumed after 4 steps") and note.endswith("record it with --first-step 4")
    assert compare(tail, whole).notes[0].startswith("the first run resumed after 4 steps")


def test_runs_with_nothing_in_common(tmp_path: Path) -> None:
    a = Training(steps=3).write(tmp_path / "a")
    other = Training(steps=3).change(lambda r: r.update(module=f"x{r['order']}", module_class=f"C{r['order']}"))
    with pytest.raises(IncomparableRunsError, match="different models"):
        compare(a, other.write(tmp_path / "b"))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        fingerprinted(Training(steps=3)).write(tmp_path / name)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert main(["compare", a, b]) == 0
    assert "Equal in every bit" in capsys.readouterr().out
    assert main(["compare", a, b, "--output-format", "json"]) == 0
    section = json.loads(capsys.readouterr().out)["compare"]
    assert section["bitwise"]["equal"] and section["loss"]["gap_at"] is None and section["tensors"]
    assert main(["compare", a, b, "--rename", "x"]) == 2
    assert "OLD=NEW" in capsys.readouterr().err


# -- the distance -----------------------------------------------------------------------------------------------------

counts = st.lists(st.integers(0, 1000), min_size=1, max_size=30)
histograms = st.builds(lambda lo, c: ExponentHistogram.of(lo, c), st.integers(-120, 100), counts)


pairs = st.lists(st.tuples(histograms, histograms, st.integers(-40, 40)), min_size=1, max_size=5)


def distance(a: ExponentHistogram, b: ExponentHistogram, shift: int = 0) -> float:
    return float(distances(Histograms.of([a]), Histograms.of([b]), np.array([shift]))[0])


def moved_mass(a: ExponentHistogram, b: ExponentHistogram, shift: int) -> float:
    """The same bin by bin: what lies in front of each edge in one and not in the other."""
    if a.total == 0 or b.total == 0:
        return math.nan
    mass: dict[int, float] = dict.fromkeys(range(-300, 300), 0.0)
    for h, by, sign in ((a, 0, 1.0), (b, shift, -1.0)):
        for i, count in enumerate(h.counts.tolist()):
            mass[h.lo + i + by] += sign * count / h.total
    return math.fsum(abs(math.fsum(mass[j] for j in range(-300, k))) for k in range(-300, 301))


@given(pairs)
@settings(max_examples=25, deadline=None)
def test_distances_of_many_are_those_of_each(rows: list[tuple[ExponentHistogram, ExponentHistogram, int]]) -> None:
    first, second, shift = zip(*rows, strict=True)
    found = distances(Histograms.of(first), Histograms.of(second), np.array(shift))
    assert found == pytest.approx([moved_mass(*row) for row in rows], abs=1e-9, nan_ok=True)


@given(histograms, histograms, histograms)
def test_the_distance_is_a_metric(a: ExponentHistogram, b: ExponentHistogram, c: ExponentHistogram) -> None:
    ab, ba, bc, ac = (distance(x, y) for x, y in ((a, b), (b, a), (b, c), (a, c)))
    if any(map(math.isnan, (ab, bc, ac))):
        assert 0 in (a.total, b.total, c.total)
        return
    assert ab == pytest.approx(ba) and ab >= 0.0
    assert ac <= ab + bc + 1e-9


@given(histograms.filter(lambda h: h.total > 0), st.integers(-40, 40))
def test_scaling_by_a_power_of_two_moves_by_the_exponent(h: ExponentHistogram, k: int) -> None:
    moved = ExponentHistogram(h.lo + k, h.counts)
    assert distance(h, moved) == pytest.approx(abs(k), abs=1e-9)
    assert distance(h, moved, -k) == pytest.approx(0.0, abs=1e-12)
    assert distance(h, h) == 0.0


# -- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [12, 200])
def test_each_run_is_read_once(steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precdoctor.diagnosis.survey.survey.MOST_ROWS", 1000)
    for name in ("a", "b"):
        fingerprinted(Training(steps=steps)).write(tmp_path / name)
    for held in (compare, lambda a, b: gate([b], a)):
        a, b = (Counted(open_run(tmp_path / name)) for name in ("a", "b"))
        held(a, b)
        assert (a.passes, b.passes) == (1, 1)
        assert a.asked == b.asked == []


def test_what_got_worse_is_one_line_a_regression_errors_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = Training(steps=8, dtype="float16"), Training(steps=8, dtype="float16")
    for module in ("norm", "head"):
        b.change(lambda r: r.update(amax=1000.0), kind="output", module=module)
    for row in b.step_rows.values():
        row["loss"] = 9.0
    main(["compare", str(a.write(tmp_path / "a").path), str(b.write(tmp_path / "b").path)])
    told = capsys.readouterr().out.partition("Worse in B (4 regressions):")[2].partition("\n\n")[0]
    assert [w for w in told.split() if w.startswith("PD8")] == ["PD804", "PD813", "PD803"]
    assert " ".join(told.split()).endswith("and 1 more")
