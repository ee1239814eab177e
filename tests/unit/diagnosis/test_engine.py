"""Selecting rules, setting options, telling "nothing there" from "nothing known"."""

import shutil
from pathlib import Path

import pytest

from precdoctor.comparison.compare import compare
from precdoctor.diagnosis import diagnose
from precdoctor.diagnosis.claims.finding import Diagnosis, Severity, Status
from precdoctor.diagnosis.engine import resolve_options
from precdoctor.diagnosis.registry import RULES
from precdoctor.errors import NothingRecordedError, RunNotFoundError, UsageError
from precdoctor.reporting.run_head import run_facts
from precdoctor.runlog import open_run
from tests.support.runs import write_run
from tests.support.training import FACTS, Training, find, normal


def statuses(diagnosis: Diagnosis) -> dict[str, Status]:
    return {r.code: r.status for r in diagnosis.rules}


def test_a_healthy_run_is_clean_and_says_what_was_looked_at(tmp_path: Path) -> None:
    diagnosis = diagnose(Training(steps=5).write(tmp_path / "run"))
    assert (diagnosis.verdict, diagnosis.findings) == ("clean", ())
    reasons = {r.code: r.reason for r in diagnosis.rules}
    assert "24 gradients on 5 steps" in reasons["PD102"]
    assert (diagnosis.run["steps"], diagnosis.run["sampled_steps"], diagnosis.run["complete"]) == (5, 5, True)
    assert diagnosis.recorder == {"overhead_fraction": 0.01, "dropped": {}, "errors": []}


def test_rules_come_in_triage_order(tmp_path: Path) -> None:
    diagnosis = diagnose(Training(steps=2).write(tmp_path / "run"))
    order = ["PD104", "PD301", "PD101", "PD401", "PD103", "PD102", "PD201", "PD105", "PD501"]
    assert [r.code for r in diagnosis.rules if r.code in order] == order


def test_a_path_is_as_good_as_an_open_run(tmp_path: Path) -> None:
    run = Training(steps=2).write(tmp_path / "run")
    assert diagnose(str(run.path)) == diagnose(run.path) == diagnose(run)
    compared = compare(str(run.path), run)
    assert (compared.a, compared.b, compared.bits.first) == (str(run.path), str(run.path), None)
    with pytest.raises(RunNotFoundError, match="nowhere"):
        diagnose(tmp_path / "nowhere")


def test_nothing_recorded(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    with pytest.raises(NothingRecordedError, match="no training step"):
        diagnose(open_run(tmp_path / "run"))


@pytest.mark.parametrize(
    ("select", "ignore", "codes"),
    [
        (["PD101"], [], ["PD101"]),
        (["nonfinite-loss", "pd104"], [], ["PD104", "PD103"]),
        (["PD1"], ["PD105", "nonfinite-loss"], ["PD104", "PD101", "PD106", "PD107", "PD108", "PD102"]),
    ],
)
def test_selection(select: list[str], ignore: list[str], codes: list[str], tmp_path: Path) -> None:
    run = Training(steps=2).write(tmp_path / "run")
    assert [r.code for r in diagnose(run, select=select, ignore=ignore).rules] == codes


def test_what_is_ignored_is_all_that_is_left_out(tmp_path: Path) -> None:
    run = Training(steps=2).write(tmp_path / "run")
    kept = [r.code for r in RULES if r.code[:3] not in ("PD1", "PD2")]
    assert [r.code for r in diagnose(run, ignore=["PD1", "PD2"]).rules] == kept


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"PD999": {}}, "no rule is called 'PD999'"),
        ({"lost-weight-update": {}}, "did you mean 'lost-weight-updates'"),
        ({"PD201": {"flushed": 0.1}}, "did you mean 'flushed_share'"),
        ({"PD201": {"flushed_share": "4 %"}}, "takes a number"),
        ({"PD201": {"flushed_share": True}}, "takes a number"),
        ({"PD201": {"flushed_share": 1.5}}, "between 0 and 1"),
        ({"PD201": {"flushed_share": float("nan")}}, "between 0 and 1"),
        ({"PD201": 3}, "table of names and numbers"),
    ],
)
def test_bad_options_are_refused_with_a_suggestion(options: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        resolve_options(options)


def test_unknown_selection_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'nonfinite-loss'"):
        diagnose(Training(steps=2).write(tmp_path / "run"), select=["nonfinite-los"])


def test_options_reach_the_rule(tmp_path: Path) -> None:
    run = Training(weight_dtype="bfloat16")
    run.change(lambda r: r.update(unchanged=400, zero=400), kind="update")
    recorded = run.write(tmp_path / "run")
    assert statuses(diagnose(recorded))["PD501"] is Status.PASSED
    strict = diagnose(recorded, options={"lost-weight-updates": {"lost-share": 0.05}})
    assert [f.code for f in strict.findings] == ["PD501"]


def test_settings_of_comparisons_are_not_a_diagnosis_business(tmp_path: Path) -> None:
    assert (
        diagnose(Training(steps=2).write(tmp_path / "run"), options={"PD801": {"flushed_share": 0.1}}).verdict
        == "clean"
    )


def test_dropped_rows_never_pass(tmp_path: Path) -> None:
    run = Training(steps=3)
    run.events.append({"event": "drop", "data": '{"rows": 17, "reason": "queue_full"}'})
    diagnosis = diagnose(run.write(tmp_path / "run"))
    assert set(statuses(diagnosis).values()) == {Status.INDETERMINATE}
    assert diagnosis.verdict == "indeterminate"
    assert "17 rows were dropped (queue_full)" in diagnosis.rules[0].reason
    assert diagnosis.recorder["dropped"] == {"queue_full": 17}


def test_a_finding_stands_although_rows_were_dropped(tmp_path: Path) -> None:
    run = Training().poison(7, "output", "head", nan=1)
    run.events.append({"event": "drop", "data": '{"rows": 17, "reason": "queue_full"}'})
    diagnosis = diagnose(run.write(tmp_path / "run"))
    assert diagnosis.verdict == "findings"
    assert statuses(diagnosis)["PD101"] is Status.FAILED


def test_a_recorder_that_gave_up_never_passes(tmp_path: Path) -> None:
    run = Training(steps=3)
    run.events.append({"event": "error", "data": '{"message": "hook failed"}'})
    diagnosis = diagnose(run.write(tmp_path / "run"))
    assert diagnosis.verdict == "indeterminate"
    assert diagnosis.recorder["errors"] == ["hook failed"]


def test_no_sampled_step_is_indeterminate(tmp_path: Path) -> None:
    run = Training(steps=3).unsample(0, 1, 2)
    result = statuses(diagnose(run.write(tmp_path / "run")))
    assert result["PD101"] is Status.INDETERMINATE
    assert result["PD301"] is Status.NOT_APPLICABLE  # it needs the steps table only


def test_sampling_alone_is_not_missing_data(tmp_path: Path) -> None:
    run = Training(steps=8).unsample(1, 2, 3, 5, 6, 7)
    assert diagnose(run.write(tmp_path / "run")).verdict == "clean"


def test_a_killed_run_is_still_diagnosed(tmp_path: Path) -> None:
    run = Training()
    run.end = False
    diagnosis = diagnose(run.write(tmp_path / "run"))
    assert (diagnosis.verdict, diagnosis.run["complete"]) == ("clean", False)


def test_the_heaviest_finding_comes_first(tmp_path: Path) -> None:
    run = Training(weight_dtype="bfloat16")
    run.change(lambda r: r.update(unchanged=1400, zero=1400), kind="update")
    run.poison(7, "output", "head", nan=1)
    findings = diagnose(run.write(tmp_path / "run")).findings
    assert [(f.code, f.severity) for f in findings] == [("PD101", Severity.ERROR), ("PD501", Severity.WARNING)]


def test_one_incident_is_one_finding_with_its_consequences(tmp_path: Path) -> None:
    run = Training().poison(7, "output", "head", nan=1)
    run.events.append({"event": "nonfinite", "step": 7, "file": "train.py", "line": 31, "data": "{}"})
    [finding] = diagnose(run.write(tmp_path / "run")).findings
    assert {c["code"] for c in finding.evidence["consequences"]} == {"PD102", "PD103", "PD105"}
    assert (finding.evidence["bad_steps"], finding.evidence["last_bad_step"]) == (5, 11)
    assert (finding.evidence["detected_at"].file, finding.evidence["detected_at"].line) == ("train.py", 31)


def test_a_collapsed_scale_after_a_bad_forward_is_its_consequence(tmp_path: Path) -> None:
    run = Training(steps=26, dtype="float16").scales([16.0] * 10 + [16.0 * 0.5**k for k in range(16)])
    for step in range(10, 26):
        run.poison(step, "output", "head", then=False, nan=1).skip(step)
        run.step_rows[step]["loss"] = float("nan")
    diagnosis = diagnose(run.write(tmp_path / "run"))
    [finding] = diagnosis.findings
    assert (finding.code, finding.location.step) == ("PD101", 10)
    assert "PD301" in {c["code"] for c in finding.evidence["consequences"]}
    assert "consequence" in next(r.reason for r in diagnosis.rules if r.code == "PD301")


def test_two_ranks_with_the_same_fault_are_one_finding(tmp_path: Path) -> None:
    run = Training(ranks=2).poison(7, "output", "head", nan=1)
    [finding] = diagnose(run.write(tmp_path / "run")).findings
    assert finding.evidence["ranks"] == [0, 1]


def test_two_faults_are_two_findings(tmp_path: Path) -> None:
    run = Training(steps=20, dtype="float16", scale=64.0)
    for step, module in ((4, "blocks.0.mlp.up"), (12, "head")):
        run.poison(step, "output", module, then=False, pos_inf=4).skip(step)
        run.step_rows[step]["loss"] = float("nan")
    findings = diagnose(run.write(tmp_path / "run")).findings
    assert [(f.location.step, f.location.module) for f in findings] == [(4, "blocks.0.mlp.up"), (12, "head")]


def test_a_defect_of_a_rule_is_not_swallowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("precdoctor.diagnosis.engine._check", broken)
    with pytest.raises(ZeroDivisionError):
        diagnose(Training(steps=2).write(tmp_path / "run"))


def test_hostile_contents_do_not_break_a_diagnosis(tmp_path: Path) -> None:
    """Names of any kind, data that is no JSON, facts of the wrong shape."""
    run = Training(steps=3).poison(1, "output", "head", nan=1)
    for row in run.tensors[1]:
        row["module"] = row["module"] and "a'b\n]]>" + row["module"]
    run.events += [{"event": "drop", "data": "{not json"}, {"event": "nonfinite", "step": 1, "data": "[1]"}]
    [finding] = diagnose(run.write(tmp_path / "run")).findings
    assert finding.code == "PD101"
    compile(finding.prescriptions[0].snippet, "<snippet>", "exec")


def test_missing_rows_of_a_bad_step_are_told(tmp_path: Path) -> None:
    """The step says it is non-finite and was sampled, its tensors are not there."""
    run = Training().poison(7, "loss", nan=1)
    run.tensors = {s: r for s, r in run.tensors.items() if s < 7}
    [finding] = diagnose(run.write(tmp_path / "run")).findings
    assert finding.code == "PD103"
    assert "not in the log" in finding.message
    assert find(run.tensors[0], "loss")["nan"] == 0


def test_all_rules_have_their_own_module() -> None:
    assert len({r.check.__module__ for r in RULES}) == len(RULES)


def test_where_optimizers_take_turns_a_finding_says_whose_step_it_speaks_of(tmp_path: Path) -> None:
    run = Training(steps=8).poison(5, "output", "head", nan=1)
    alone = diagnose(run.write(tmp_path / "alone")).findings[0]
    for row in run.step_rows.values():
        row["optimizer"] = ("Muon#0", "AdamW#0")[row["step"] % 2]
    both = diagnose(run.write(tmp_path / "both")).findings[0]

    assert (alone.step_words(5), alone.resume_words) == ("step 5", "from a checkpoint at or before step 4")
    assert "own_steps" not in alone.evidence
    assert both.step_words(5) == "step 5 (step 2 of AdamW#0)"
    assert both.resume_words == "from a checkpoint at or before step 4 (step 2 of Muon#0)"
    del run.step_rows[1]  # a row was lost
    assert diagnose(run.write(tmp_path / "lost")).findings[0].step_words(5) == "step 5"


def test_a_resumed_run_says_which_step_of_the_optimizer_it_speaks_of(tmp_path: Path) -> None:
    resumed = {**FACTS, "optimizers": [{**FACTS["optimizers"][0], "steps_before": 1000}]}
    run = Training(steps=8, facts=resumed).poison(5, "output", "head", nan=1)
    for row in run.step_rows.values():
        row["optimizer"] = "AdamW#0"
    found = diagnose(run.write(tmp_path / "run"))
    assert found.findings[0].step_words(5) == "step 5 (step 1005 of AdamW#0)"
    assert found.findings[0].resume_words == "from a checkpoint at or before step 4 (step 1004 of AdamW#0)"
    assert "steps 0–7, resumed after 1,000 steps of AdamW#0, 1 rank" in run_facts(found.run)


def test_of_processes_that_share_a_rank_a_finding_names_one(tmp_path: Path) -> None:
    run = Training(steps=8).poison(5, "output", "head", nan=1)
    for row in run.step_rows.values():
        row["optimizer"] = ("Muon#0", "AdamW#0")[row["step"] % 2]
    path = run.write(tmp_path / "run").path
    assert diagnose(path).findings[0].location.rank_place == "rank 0"
    (path / "rank-00000").rename(path / "rank-00000.1")
    Training(steps=8).write(tmp_path / "sound")
    shutil.copytree(tmp_path / "sound" / "rank-00000", path / "rank-00000")
    (finding,) = diagnose(path).findings
    assert finding.location.rank_place == "rank 0 attempt 1"
    assert finding.evidence["own_steps"][0] == {"step": 5, "optimizer": "AdamW#0", "number": 2}


@pytest.mark.parametrize(("steps", "severity"), [(4, Severity.INFO), (12, Severity.WARNING)])
def test_what_a_fresh_model_may_leave_by_itself_is_a_note_in_a_smoke_test(steps, severity, tmp_path: Path) -> None:
    """A gradient far below Adam's eps."""
    run = Training(steps=steps).change(lambda r: r.update(normal(1e-10)), kind="weight_grad_step", module="head")
    (finding,) = diagnose(run.write(tmp_path / "run"), select=["PD503"]).findings
    assert finding.severity is severity
    assert ("because the run has 4 steps" in finding.message) == (severity is Severity.INFO)
