"""What deep scans left in the log, as rules and reports read it."""

from __future__ import annotations

import json

import pytest

from precdoctor.diagnosis import diagnose
from precdoctor.diagnosis.analyses.op_dtypes import op_dtypes, patterns
from precdoctor.diagnosis.analyses.scans import facts, scans
from precdoctor.diagnosis.claims.finding import Status
from precdoctor.diagnosis.survey.view import RunView
from tests.support.scanning import fact, scanned, used
from tests.support.training import FACTS, Training

OVERFLOW = fact("overflow", "mul.Tensor", affected=64, exact_amax=9e4, wrong=64, of=256, seen=0.0, exact=0.9,
                shown_by=used("mul.Tensor"), hidden_by=used("rsqrt.default"))  # fmt: skip
CODES = ("PD107", "PD206", "PD207", "PD208", "PD701", "PD705", "PD706")


def outcomes(run: Training, path) -> dict[str, tuple[Status, str]]:
    diagnosis = diagnose(run.write(path / "run"))
    return {r.code: (r.status, r.reason) for r in diagnosis.rules if r.code in CODES}


def test_a_step_that_went_wrong_for_all_to_see_has_findings_of_its_own(tmp_path):
    run = scanned(OVERFLOW, steps=(3, 5))
    run.events.append({"event": "incident", "step": 3, "data": "{}"})
    run.step_rows[5]["loss"] = float("nan")
    view = RunView(run.write(tmp_path / "run"))
    assert [s.step for s in scans(view)] == [3, 5]
    assert facts(view, "overflow") == []


def test_why_nothing_was_scanned_is_said(tmp_path):
    assert {status for status, _ in outcomes(Training(), tmp_path / "a").values()} == {Status.NOT_APPLICABLE}
    run = Training()
    data = {"kind": "step", "outcome": "refused", "why": "torch.compile is in use"}
    run.events.append({"event": "scan", "step": 0, "data": json.dumps(data)})
    found = outcomes(run, tmp_path / "b")
    assert set(found.values()) == {(Status.NOT_APPLICABLE, "torch.compile is in use")}
    found = outcomes(scanned(), tmp_path / "c")
    assert {status for status, _ in found.values()} == {Status.PASSED}
    assert all("240 ops of 2 scanned steps" in reason for _, reason in found.values())


def test_what_a_hostile_log_holds_is_no_crash(tmp_path):
    run = scanned(fact("overflow", "mul.Tensor", wrong="many", of=None, hidden_by=3, shown_by={"line": "x"}, results=7))
    run.events.append({"event": "scan", "step": 0, "data": json.dumps({"kind": "coverage", "ops": [1, {"op": None}]})})
    run.events.append({"event": "scan", "step": None, "data": "[]"})
    view = RunView(run.write(tmp_path / "run"))
    assert facts(view, "overflow")[0].count("wrong") == 0
    assert [e.op for e in op_dtypes(view)] == [""]
    assert diagnose(view.run).verdict == "clean"


def coverage(step: int, module: str, *ops: dict) -> dict:
    data = json.dumps({"kind": "coverage", "ops": list(ops)})
    return {"event": "scan", "step": step, "root": "GPT#0", "module": module, "data": data}


def op(name: str, inputs: str, outputs: str, **more) -> dict:
    return {"op": f"aten.{name}", "phase": "forward", "inputs": inputs, "outputs": outputs, "calls": 1, **more}


@pytest.mark.parametrize(("states", "findings"), [(("exp_avg_sq", "exp_avg_sq"), 1), (("exp_avg_sq", "exp_avg"), 2)])
def test_a_state_that_two_ops_leave_as_it_was_is_told_of_once(states, findings, tmp_path):
    told = []
    for name, state, stalled in zip(("mul_.Tensor", "addcmul_.default"), states, (9, 8), strict=True):
        found = fact("stalled", name, moved=9, stalled=stalled, of=9, tensors=1, bits_missing=1.0, value=1.0, move=1e-3)
        found["data"] |= {"dtype": "bfloat16", "target": "state", "state": state, "name": "head.weight"}
        told.append(found)
    report = diagnose(scanned(*told).write(tmp_path / "run"), select=["PD509"])
    assert len(report.findings) == findings
    assert report.findings[0].location.op == "aten.mul_.Tensor"
    assert (" `addcmul` leaves it unchanged, too." in report.findings[0].message) == (findings == 1)


@pytest.mark.parametrize(("weights", "change"), [("float32", "state_dtype"), ("bfloat16", "weight_dtype")])
def test_states_in_the_format_of_the_weights_call_for_wider_weights(weights, change, tmp_path):
    found = fact("stalled", "mul_.Tensor", moved=9, stalled=9, of=9, tensors=1, bits_missing=2.5, value=1.0, move=1e-3)
    found["data"] |= {"dtype": "bfloat16", "target": "state", "state": "exp_avg_sq", "name": "head.weight"}
    (root,) = FACTS["roots"]
    owned = {**root, "parameters": [{**p, "dtype": weights} for p in root["parameters"]]}
    run = scanned(found, facts={**FACTS, "roots": [owned]})
    (finding,) = diagnose(run.write(tmp_path / "run"), select=["PD509"]).findings
    assert finding.prescriptions[0].change[change] == {"from": "bfloat16", "to": "float32"}
    assert ("model.float()" in finding.prescriptions[0].snippet) == (weights == "bfloat16")


def test_dtypes_by_op_are_those_of_the_last_scan_that_differed(tmp_path):
    run = scanned()
    run.events += [
        coverage(0, "blocks.0.attn", op("bmm.default", "float32", "float32", numel=8)),
        coverage(1, "blocks.0.attn", op("bmm.default", "bfloat16", "bfloat16", numel=8, amax=2.0, line=3),
                 op("bmm.default", "bfloat16", "bfloat16", numel=4, amax=5.0, line=4, pos_inf=1)),
        coverage(0, "blocks.1.attn", op("bmm.default", "bfloat16", "bfloat16", numel=8)),
        coverage(0, "", op("add_.Tensor", "float32,bfloat16", "float32")),
    ]  # fmt: skip
    entries = op_dtypes(RunView(run.write(tmp_path / "run")))
    assert [(e.module, e.op, e.inputs, e.calls, e.elements, e.non_finite, e.amax) for e in entries] == [
        ("blocks.0.attn", "aten.bmm.default", "bfloat16", 2, 12, 1, 5.0),
        ("blocks.1.attn", "aten.bmm.default", "bfloat16", 1, 8, 0, None),
        ("", "aten.add_.Tensor", "float32,bfloat16", 1, 0, 0, None),
    ]
    rows = [(p.op, p.inputs, p.outputs, list(p.modules), p.calls) for p in patterns(entries)]
    assert rows == [
        ("add", "float32,bfloat16", "float32", ["GPT#0"], 1),
        ("bmm", "bfloat16", "bfloat16", ["blocks.*.attn"], 3),
    ]


def certainties(run: Training, path) -> dict[str, float]:
    return {f.code: f.confidence for f in diagnose(run.write(path)).findings if f.code in CODES}


ENDS = {"effect": 0.5, "fed": used("add.Tensor")}


def test_one_scanned_step_is_less_certain_than_several(tmp_path):
    one = {**OVERFLOW, "data": {**OVERFLOW["data"], **ENDS}}
    assert certainties(scanned(one, steps=(0, 1)), tmp_path / "several") == {"PD107": 0.95}
    assert certainties(scanned(one, steps=(1,)), tmp_path / "one") == {"PD107": 0.7}
    assert certainties(scanned(OVERFLOW), tmp_path / "not followed") == {"PD107": 0.7}


def scale(run: Training, path) -> float | None:
    [finding] = [f for f in diagnose(run.write(path)).findings if f.code == "PD706"]
    return finding.prescriptions[0].change.get("scale_before_cast")


@pytest.mark.parametrize(
    ("to", "amax", "bulk", "expected"),
    [
        ("float16", 1e-8, 2.0**-30, 2.0**16),
        ("float16", 3.0, 2.0**-24, 2.0**10),
        ("float16", 60000.0, 2.0**-24, None),
        ("float8_e4m3fn", 4.9e-4, 2.0**-12, 2.0**6),
        ("float8_e4m3fn", 9000.0, 2.0, 2.0**-6),
        ("float16", 1e6, 8.0, 2.0**-5),
    ],
)
def test_a_scale_is_no_larger_than_the_format_needs(to, amax, bulk, expected, tmp_path):
    """It lifts the bulk over the subnormals, or takes the largest element a binade below the maximum."""
    shrinks = expected is not None and expected < 1.0
    counts = {"flushed": 0 if shrinks else 200, "clipped": 200 if shrinks else 0, "nonzero": 256, "numel": 256}
    sizes = {"lost": 0.9, "amax": amax, "amin_nonzero": bulk, "bulk": bulk}
    run = scanned(fact("cast", "_to_copy.default", **{"from": "float32", "to": to}, **counts, **sizes, **ENDS))
    assert scale(run, tmp_path / "run") == expected


PACKAGE = "/venv/lib/python3.11/site-packages/norms/functional.py"


@pytest.mark.parametrize(
    ("caller", "called", "led"),
    [
        ({"file": "train.py", "line": 17}, "at train.py:17", "; the last line of yours that led there is train.py:17."),
        (None, "that leads to norms/functional.py:42", "."),
        ("train.py:17", "that leads to norms/functional.py:42", "."),
    ],
)
def test_a_library_is_not_to_be_edited(caller, called, led, tmp_path):
    found = fact("reduction", "sum.dim_IntList", error=0.5, error_of_magnitudes=0.5, terms=4096, effect=0.5)
    found["file"] = PACKAGE
    found["data"] |= {"dtype": "float16", **({} if caller is None else {"caller": caller})}
    (finding,) = diagnose(scanned(found).write(tmp_path / "run"), select=["PD701"]).findings
    assert finding.title.endswith(" at norms/functional.py:42")
    assert finding.message.endswith(f" norms/functional.py is part of a library{led}")
    (prescription,) = finding.prescriptions
    assert f" around the call {called}: error" in prescription.title


def test_angles_of_a_library_are_not_to_be_changed_there(tmp_path):
    place = {"file": PACKAGE, "line": 9}
    run = scanned()
    for step in (0, 1):
        entries = (op("mul.Tensor", "bfloat16", "bfloat16", numel=512, amax=1000.0, **place),
                   op("cos.default", "bfloat16", "bfloat16", numel=512, amax=1.0, **place))  # fmt: skip
        run.events.append(coverage(step, "blocks.0.attn", *entries))
    (finding,) = diagnose(run.write(tmp_path / "run"), select=["PD703"]).findings
    assert finding.location.source.file == "norms/functional.py"
    assert " around the call that leads to norms/functional.py:9: off by" in finding.prescriptions[0].title
