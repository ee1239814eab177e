"""Every rule against its samples: those that must fire do, as they should; those that must not, do not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from precdoctor.diagnosis import diagnose
from precdoctor.diagnosis.claims.finding import Severity, Status
from precdoctor.diagnosis.engine import diagnose_view, resolve_options, view_of
from precdoctor.diagnosis.prescriptions.prescribed import Prescribed, prescribe
from precdoctor.diagnosis.registry import RULES
from precdoctor.runlog import open_run
from tests.support import samples
from tests.support.samples import Sample, check_form
from tests.support.training import Training

FIRING = [pytest.param(code, sample, id=f"{code}-{name}") for code, name, sample in samples.firing()]
HEALTHY = [pytest.param(code, make, id=f"{code}-{name}") for code, name, make in samples.healthy()]
RECORDED_FIRING = [pytest.param(code, p, id=f"{code}-{p.name}") for code, p in samples.recorded("firing")]
RECORDED_HEALTHY = [pytest.param(code, p, id=f"{code}-{p.name}") for code, p in samples.recorded("healthy")]


@pytest.mark.parametrize(("code", "sample"), FIRING)
def test_fires(code: str, sample: Sample, tmp_path: Path) -> None:
    asked = [code[:3], *sample.also, *sample.weighed_by]
    diagnosis = diagnose(sample.make().write(tmp_path / "run"), select=asked)

    heavy = [f for f in diagnosis.findings if f.severity is not Severity.INFO or f.code == code]
    assert {f.code for f in heavy} == {code, *sample.also}
    [finding] = [f for f in heavy if f.code == code]
    seen: dict[str, Any] = {
        "step": finding.location.step,
        "module": finding.location.module,
        "kind": finding.location.kind,
        "rank": finding.location.rank,
        "cause": finding.cause,
        "severity": finding.severity.value,
        "last_finite": finding.evidence.get("last_finite_step"),
    }
    assert {k: v for k, v in seen.items() if getattr(sample, k) is not ...} == {
        k: getattr(sample, k) for k in seen if getattr(sample, k) is not ...
    }
    for piece in sample.says:
        assert piece in f"{finding.title} {finding.message}"
    for key, value in sample.evidence.items():
        assert finding.evidence[key] == value
    assert {r.code: r.status for r in diagnosis.rules}[code] is Status.FAILED
    check_form(finding, bare=sample.bare)


@pytest.mark.parametrize(("code", "make"), HEALTHY)
def test_stays_quiet(code: str, make: Callable[[], Training], tmp_path: Path) -> None:
    diagnosis = diagnose(make().write(tmp_path / "run"), select=[code])

    assert [f for f in diagnosis.findings if f.severity is not Severity.INFO] == []
    assert diagnosis.verdict == "clean"
    [outcome] = [r for r in diagnosis.rules if r.code == code]
    assert outcome.status in (Status.PASSED, Status.NOT_APPLICABLE)
    assert outcome.reason


@pytest.mark.slow
def test_other_rules_stay_quiet(tmp_path: Path) -> None:
    offenders = {}
    for code, name, sample in samples.firing():
        diagnosis = diagnose(sample.make().write(tmp_path / f"firing-{code}-{name}"))
        heavy = {f.code for f in diagnosis.findings if f.severity is not Severity.INFO or f.code == code}
        if heavy != {code, *sample.also}:
            offenders[code, name] = [f.title for f in diagnosis.findings]
    for code, name, make in samples.healthy():
        diagnosis = diagnose(make().write(tmp_path / f"{code}-{name}"))
        if diagnosis.verdict != "clean":
            offenders[code, name] = [f.title for f in diagnosis.findings if f.severity is not Severity.INFO]
    assert offenders == {}


@pytest.mark.parametrize(("code", "folder"), RECORDED_FIRING)
def test_recorded_run_fires(code: str, folder: Path) -> None:
    view = view_of(open_run(folder / "run"))
    diagnosis = diagnose_view(view, RULES, resolve_options({}))

    [finding] = [f for f in diagnosis.findings if f.severity is not Severity.INFO or f.code == code]
    assert finding.code == code
    expected = json.loads((folder / "expected.json").read_text())
    place = finding.location
    seen = {"step": place.step, "root": place.root, "module": place.module or "", "kind": place.kind}
    seen |= {"cause": finding.cause, "severity": finding.severity.value}
    assert {key: seen[key] for key in expected} == expected
    assert {"kind", "cause", "severity"} <= expected.keys()
    check_form(finding, bare="path" not in finding.evidence)
    for prescribed in prescribe(view, diagnosis):
        _check_promise(prescribed)


def _check_promise(prescribed: Prescribed) -> None:
    """Nothing is applied without a number from the run."""
    assert not prescribed.apply or prescribed.effects, "no promise without a number"
    assert not prescribed.apply or prescribed.changes
    assert prescribed.apply or prescribed.why_not
    for effect in prescribed.effects:
        assert effect.measure.unit != "share" or 0.0 <= effect.after <= 1.0
        assert effect.measure.unit != "steps" or 0 <= effect.after <= effect.steps


@pytest.mark.parametrize(("code", "folder"), RECORDED_HEALTHY)
def test_recorded_run_stays_quiet(code: str, folder: Path) -> None:
    diagnosis = diagnose(open_run(folder / "run"))

    assert [f for f in diagnosis.findings if f.severity is not Severity.INFO] == []
    assert diagnosis.verdict == "clean"
    # Something was there to be looked at: a sample its rule does not apply to tempts nobody.
    assert {r.code: r.status for r in diagnosis.rules}[code] is Status.PASSED


def test_every_rule_has_firing_and_healthy_samples() -> None:
    known = {r.code for r in RULES}
    assert {code for code, _, _ in samples.firing()} == known
    assert {code for code, _, _ in samples.healthy()} == known
    assert {code for code, _ in samples.recorded("firing")} == known
    assert {code for code, _ in samples.recorded("healthy")} == known


@pytest.mark.parametrize("code", [c for c in samples.codes() if c in ("PD101", "PD102", "PD103", "PD104", "PD105")])
def test_path_ends_at_the_origin_and_is_in_execution_order(code: str, tmp_path: Path) -> None:
    name, sample = next((n, s) for c, n, s in samples.firing() if c == code and not s.bare)
    finding = next(f for f in diagnose(sample.make().write(tmp_path / name)).findings if f.code == code)
    path = finding.evidence["path"]
    assert (path[-1]["kind"], path[-1]["nan"] + path[-1]["inf"] > 0) == (finding.location.kind, True)
    orders = [e["order"] for e in path]
    assert orders == sorted(orders)
    assert all(e["nan"] == 0 for e in path[:-1])
