from __future__ import annotations

import dataclasses
import json

import jsonschema
import pytest

from precdoctor.diagnosis.claims.finding import Diagnosis
from precdoctor.reporting.json_report import document, dumps
from tests.support.diagnoses import BROKEN, CLEAN, OVERFLOW, UNKNOWN
from tests.support.hostile import NAMES
from tests.support.offenders import check_each
from tests.support.schemas import schema
from tests.unit.reporting.test_terminal import hostile

VALIDATOR = jsonschema.Draft202012Validator(schema())


@pytest.mark.parametrize("diagnosis", [BROKEN, CLEAN, UNKNOWN], ids=["broken", "clean", "unknown"])
def test_reports_follow_the_published_schema(diagnosis: Diagnosis):
    report = json.loads(dumps(document(diagnosis, 0)))
    VALIDATOR.validate(report)
    assert list(report) == ["schema_version", "tool", "run", "verdict", "exit_code", "findings", "rules", "recorder"]
    assert report["verdict"] == diagnosis.verdict


def test_a_finding_has_the_agreed_keys():
    (finding, _) = document(BROKEN, 1)["findings"]
    assert list(finding) == [
        "code", "name", "severity", "confidence", "title", "message", "location", "cause", "evidence", "prescriptions",
    ]  # fmt: skip
    assert list(finding["location"]) == [
        "root",
        "module",
        "module_class",
        "kind",
        "phase",
        "rank",
        "step",
        "op",
        "source",
        "coordinates",
        "attempt",
    ]
    assert finding["location"]["source"] == {"file": "train.py", "line": 42, "code": "att = q @ k.transpose(-2, -1)"}


def test_non_finite_numbers_are_strings_everywhere():
    evidence = {"loss": float("nan"), "path": [dict(OVERFLOW.evidence["path"][0], amax=float("inf"))]}
    diagnosis = dataclasses.replace(BROKEN, findings=(dataclasses.replace(OVERFLOW, evidence=evidence),))
    report = json.loads(dumps(document(diagnosis, 0)), parse_constant=lambda name: pytest.fail(name))
    VALIDATOR.validate(report)
    assert report["findings"][0]["evidence"]["loss"] == "NaN"
    assert report["findings"][0]["evidence"]["path"][0]["amax"] == "Infinity"


def test_hostile_names_survive_unchanged_and_harmless():
    check_each(check_json, NAMES, repr)


def check_json(name):
    text = dumps(document(hostile(name), 0))
    assert text.isascii()
    assert not any(c < " " for c in text.replace("\n", ""))
    assert json.loads(text)["findings"][0]["location"]["module"] == name


def test_the_schema_refuses_what_is_not_a_report():
    jsonschema.Draft202012Validator.check_schema(schema())
    for change in ({"schema_version": 2}, {"verdict": "fine"}, {"exit_code": 7}, {"findings": [{}]}):
        with pytest.raises(jsonschema.ValidationError):
            VALIDATOR.validate({**document(CLEAN, 0), **change})
