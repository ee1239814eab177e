"""The CI verdict: exit codes, lines, regressions against a baseline."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from precdoctor.comparison.gate import GateCheck, GateReport, gate
from precdoctor.comparison.regressions import REGRESSIONS
from precdoctor.diagnosis.claims.finding import Status
from precdoctor.diagnosis.registry import select_rules
from precdoctor.errors import NothingRecordedError, UsageError
from precdoctor.runlog import Run, open_run
from tests.support.runs import write_run
from tests.support.training import Row, Training, find, histogram, spoil

Make = Callable[..., Run]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Writes trainings into numbered directories."""
    count = iter(range(100))
    return lambda training: training.write(tmp_path / f"run-{next(count)}")


def failed(report: GateReport) -> list[GateCheck]:
    return [c for c in report.checks if c.passed is False]


def test_a_healthy_run_passes(make: Make) -> None:
    report = gate([make(Training(steps=4))])
    assert (report.exit_code, report.passed, failed(report)) == (0, True, [])
    assert [c.check.split()[0] for c in report.checks] == [r.code for r in select_rules()]


def test_equal_runs_pass_every_regression(make: Make) -> None:
    report = gate([make(Training(dtype="float16"))], make(Training(dtype="float16")))
    assert report.exit_code == 0
    lines = {c.check.split()[0]: c for c in report.checks if c.check.startswith("PD8")}
    assert lines.keys() == {r.code for r in REGRESSIONS if r.compare is not None}
    assert all(c.passed and c.expected and c.found and c.limit for c in lines.values())


def test_a_finding_fails_the_gate(make: Make) -> None:
    report = gate([make(Training().poison(7, "output", "head", nan=1))])
    assert report.exit_code == 1
    [line] = failed(report)
    assert (line.check, line.subject, line.fails) == ("PD101 nonfinite-origin-forward", "head, step 7", True)


@pytest.mark.parametrize(("level", "code"), [("error", 0), ("warning", 1)])
def test_the_level_decides(level: str, code: int, make: Make) -> None:
    run = Training(weight_dtype="bfloat16").change(lambda r: r.update(unchanged=1400, zero=1400), kind="update")
    report = gate([make(run)], fail_on=level)
    assert report.exit_code == code
    assert [c.fails for c in failed(report)] == [bool(code)]


def test_one_bad_run_among_several_fails(make: Make) -> None:
    good, bad = make(Training()), make(Training().poison(7, "output", "head", nan=1))
    report = gate([good, bad])
    assert report.exit_code == 1
    assert [c.run for c in failed(report)] == [str(bad.path)]
    assert report.diagnosis.findings[0].evidence["run"] == str(bad.path)
    assert {r.status for r in report.diagnosis.rules if r.code == "PD101"} == {Status.FAILED}


def test_killed_without_finding_is_no_verdict(make: Make) -> None:
    run = Training(steps=4)
    run.end = False
    report = gate([make(run)])
    assert report.exit_code == 3
    assert "never closed" in report.untrustworthy[0]


def test_killed_with_a_finding_fails(make: Make) -> None:
    run = Training().poison(7, "output", "head", nan=1)
    run.end = False
    assert gate([make(run)]).exit_code == 1


def test_drops_are_no_verdict_even_with_a_finding(make: Make) -> None:
    run = Training().poison(7, "output", "head", nan=1)
    run.events.append({"event": "drop", "data": '{"rows": 17, "reason": "queue_full"}'})
    report = gate([make(run)])
    assert report.exit_code == 3
    assert failed(report)


def test_nothing_recorded(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    with pytest.raises(NothingRecordedError):
        gate([open_run(tmp_path / "run")])


# -- regressions ------------------------------------------------------------------------------------------------------


#: Fire with others where values change at all: these rows all come from the same weights and data.
BROAD = ("PD811", "PD813")


def regressed(
    make: Make, change: Callable[[Training], object], ignore: tuple[str, ...] = BROAD, **options: str
) -> list[GateCheck]:
    """The failed PD8 lines of a run changed like this, held against an unchanged one."""
    run = Training(**options)  # type: ignore[arg-type]
    change(run)
    report = gate([make(run)], make(Training(**options)), ignore=ignore)  # type: ignore[arg-type]
    lines = [c for c in failed(report) if c.check.startswith("PD8")]
    codes = {f.code for f in report.findings if f.code.startswith("PD8")}
    assert codes == {c.check.split()[0] for c in lines}
    assert report.exit_code == int(any(c.fails for c in failed(report)))
    return lines


def test_underflow(make: Make) -> None:
    stored = np.random.default_rng(0).normal(0, 4e-7, 20_000).astype(np.float16)

    def change(run: Training) -> None:
        run.change(lambda r: r.update(histogram(stored)), kind="grad_output", module="norm")

    lines = regressed(make, change, dtype="float16")
    assert [(c.check, c.subject) for c in lines] == [("PD801 underflow-increased", "GPT#0 norm grad_output")]
    assert (lines[0].expected, lines[0].limit) == ("0 %", "+2 %")
    assert 4.0 < float(lines[0].found.split()[0]) < 8.0  # erf(3e-8 / 4e-7 / sqrt(2)) = 6 %


def test_saturation(make: Make) -> None:
    lines = regressed(make, lambda run: run.change(lambda r: r.update(at_max=100), kind="output", module="norm"))
    assert [(c.check, c.found) for c in lines] == [("PD802 saturation-increased", "2.4 %")]


@pytest.mark.parametrize(("amax", "severity"), [(1000.0, "warning"), (60000.0, "error"), (20.0, None)])
def test_headroom(amax: float, severity: str | None, make: Make) -> None:
    def change(run: Training) -> None:
        run.change(lambda r: r.update(amax=amax), kind="output", module="norm")

    lines = regressed(make, change, dtype="float16")
    assert [(c.check, c.severity) for c in lines] == ([("PD803 headroom-lost", severity)] if severity else [])


@pytest.mark.parametrize(("amax", "fails"), [(1e20, False), (1e30, True)])
def test_headroom_that_fp32_has_plenty_of_is_not_missed(amax: float, fails: bool, make: Make) -> None:
    def change(run: Training) -> None:
        run.change(lambda r: r.update(amax=amax), kind="output", module="norm")

    lines = regressed(make, change, dtype="float32")
    assert [c.check for c in lines if c.check.startswith("PD803")] == ["PD803 headroom-lost"] * fails


@pytest.mark.parametrize(
    ("loss", "fails"), [(2.5, False), (2.6, False), (2.4, False), (2.7, True), (float("inf"), True)]
)
def test_loss(loss: float, fails: bool, make: Make) -> None:
    def change(run: Training) -> None:
        for row in run.step_rows.values():
            row["loss"] = loss

    lines = regressed(make, change)
    assert [c.check for c in lines] == (["PD804 loss-increased"] if fails else [])


def test_a_single_loss_outlier_is_no_regression(make: Make) -> None:
    assert regressed(make, lambda run: run.step_rows[11].update(loss=9.0)) == []


def test_new_nonfinite_tensors(make: Make) -> None:
    lines = regressed(make, lambda run: spoil(find(run.tensors[5], "output", "norm"), pos_inf=1))
    assert [(c.check, c.subject) for c in lines] == [("PD805 new-nonfinite-tensors", "GPT#0 norm output")]
    assert lines[0].found == "1 tensor, first at step 5"


def test_masks_of_both_runs_and_skipped_steps_are_not_new(make: Make) -> None:
    def masked() -> Training:
        run = Training(dtype="float16").change(lambda r: spoil(r, neg_inf=9), kind="output", module="norm")
        return run.scales([1024.0] * 8 + [512.0] * 4)

    report = gate([make(masked().skip(7))], make(masked()), ignore=["PD811"])  # its rows ignore their scale
    assert (report.exit_code, failed(report)) == (0, [])


def test_lost_updates(make: Make) -> None:
    def change(run: Training) -> None:
        run.change(lambda r: r.update(unchanged=700, zero=700), kind="update", module="norm")

    lines = regressed(make, change, weight_dtype="bfloat16")
    assert [(c.check, c.found) for c in lines] == [("PD806 lost-updates-increased", "17 %")]


def test_missing_tensors_are_a_warning(make: Make) -> None:
    def change(run: Training) -> None:
        for step, rows in run.tensors.items():
            run.tensors[step] = [r for r in rows if r["module"] != "norm"]

    lines = regressed(make, change)
    assert [(c.check, c.severity, c.fails) for c in lines] == [("PD807 tensors-missing", "warning", False)]
    assert "missing" in lines[0].found


# -- runs that cannot be compared -------------------------------------------------------------------------------------


def test_disjoint_steps_are_no_verdict(make: Make) -> None:
    later = Training(steps=6)
    later.tensors = {s + 100: [r | {"step": s + 100} for r in rows] for s, rows in later.tensors.items()}
    later.step_rows = {s + 100: r | {"step": s + 100} for s, r in later.step_rows.items()}
    report = gate([make(later)], make(Training(steps=6)))
    assert report.exit_code == 3
    assert "no common steps: the run has steps 100 to 105, the baseline 0 to 5" in report.untrustworthy[0]


def test_disjoint_samples_are_no_verdict(make: Make) -> None:
    report = gate([make(Training(steps=4).unsample(0, 2))], make(Training(steps=4).unsample(1, 3)))
    assert report.exit_code == 3
    assert "sampled" in report.untrustworthy[0]


def _renamed(row: Row) -> None:
    row["module"] = "other." + row["module"]
    row["module_class"] = "Other" + str(row["module_class"])  # of the same class it would be the same module, renamed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_renamed, "of 100 tensors occur in both runs"),
        (lambda r: r.update(shape=[8, 8]), "0 of 8 weights have the same shape"),
    ],
)
def test_another_model_is_no_verdict(change: Callable[[Row], None], words: str, make: Make) -> None:
    report = gate([make(Training(steps=3).change(change))], make(Training(steps=3)))
    assert report.exit_code == 3
    assert words in report.untrustworthy[0]


def test_a_renamed_module_is_still_compared(make: Make) -> None:
    def rename(row: Row) -> None:
        row["module"] = row["module"].replace("blocks", "layers")

    report = gate([make(Training(steps=3).change(rename))], make(Training(steps=3)))
    assert (report.exit_code, failed(report)) == (0, [])


def test_a_changed_dtype_is_a_line(make: Make) -> None:
    run = Training(steps=3).change(lambda r: r.update(dtype="bfloat16"), module="head", kind="output")
    report = gate([make(run)], make(Training(steps=3)))
    assert [(c.check, c.expected, c.found) for c in failed(report)] == [("PD808 dtype-changed", "float32", "bfloat16")]


def test_incomparable_beats_findings(make: Make) -> None:
    run = Training(steps=8).poison(7, "output", "head", nan=1).change(_renamed)
    assert gate([make(run)], make(Training())).exit_code == 3


def test_a_baseline_with_drops_is_no_yardstick(make: Make) -> None:
    base = Training(steps=3)
    base.events.append({"event": "drop", "data": '{"rows": 1, "reason": "disk"}'})
    report = gate([make(Training(steps=3))], make(base))
    assert report.exit_code == 3
    assert "baseline cannot be trusted" in report.untrustworthy[0]


def test_a_sick_baseline_is_noted(make: Make) -> None:
    report = gate([make(Training())], make(Training().poison(7, "output", "head", nan=1)))
    assert report.exit_code == 0
    assert report.notes[0].startswith("the baseline itself has PD101")


# -- options ----------------------------------------------------------------------------------------------------------


def test_selection_and_options_reach_regressions(make: Make) -> None:
    run, base = Training(), Training()
    for row in run.step_rows.values():
        row["loss"] = 2.7
    pair = (make(run), make(base))
    assert gate([pair[0]], pair[1], ignore=["PD804"]).exit_code == 0
    assert gate([pair[0]], pair[1], options={"loss-increased": {"relative": 0.2}}).exit_code == 0
    assert {c.check.split()[0] for c in gate([pair[0]], pair[1], select=["PD804"]).checks} == {"PD804"}


@pytest.mark.parametrize("bad", [{"fail_on": "info"}, {"select": ["PD9"]}, {"options": {"PD801": {"x": 1}}}])
def test_usage_errors(bad: dict, make: Make) -> None:
    with pytest.raises(UsageError):
        gate([make(Training(steps=2))], **bad)


def test_regressions_are_described() -> None:
    assert [r.code for r in REGRESSIONS] == [f"PD8{n:02}" for n in range(1, 17) if n != 10]  # PD810 is compare's own
    for regression in REGRESSIONS:
        assert regression.doc.endswith(".")
        assert all(o.unit and o.doc and o.source for o in regression.options)
