"""The prescription file: it comes back as it was written, and anything unknown in it is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precdoctor.diagnosis.prescriptions.effects import Effect
from precdoctor.diagnosis.prescriptions.file import chosen_changes, dumps, load, parse, statement
from precdoctor.diagnosis.prescriptions.measures import MEASURES, Scope
from precdoctor.diagnosis.prescriptions.prescribed import Prescribed
from precdoctor.errors import UsageError
from precdoctor.runlog.changes import Change
from tests.unit.runlog.test_changes import changes

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def effects(draw):
    measure = draw(st.sampled_from(sorted(MEASURES)))
    scope = Scope(draw(NAMES), draw(NAMES), draw(NAMES), draw(NAMES), draw(st.integers(0, 15)))
    return Effect(MEASURES[measure], scope, draw(NUMBERS), draw(NUMBERS), draw(st.none() | st.integers(1, 10**6)))


@st.composite
def prescriptions(draw):
    made = tuple(draw(st.lists(changes(), max_size=3)))
    return Prescribed(
        code=draw(NAMES),
        finding=draw(NAMES),
        confidence=draw(st.floats(0, 1)),
        title=draw(NAMES),
        apply=bool(made) and draw(st.booleans()),
        why_not=draw(NAMES),
        changes=made,
        effects=tuple(draw(st.lists(effects(), max_size=3))),
        memory_bytes=draw(st.none() | st.integers(0, 2**50)),
        evidence=draw(st.none() | st.dictionaries(NAMES, NUMBERS | st.integers(-(2**60), 2**60), max_size=3)),
        snippets=draw(st.dictionaries(NAMES, st.text(max_size=60), max_size=2)),
    )


@given(st.lists(prescriptions(), max_size=3), st.text(max_size=30))
def test_what_is_written_is_read(tmp_path_factory, listed, run):
    file = tmp_path_factory.mktemp("prescription") / "fix.toml"
    file.write_text(dumps(listed, run), encoding="utf-8")
    read, run_read = load(file)
    assert run_read == run.encode("utf-8", "replace").decode()
    for ours, theirs in zip(listed, read, strict=True):
        for field in ("code", "finding", "confidence", "title", "apply", "why_not", "effects"):
            assert getattr(ours, field) == getattr(theirs, field)
        assert [_text(c) for c in ours.changes] == [_text(c) for c in theirs.changes]


def _text(change):
    return {k: v.encode("utf-8", "replace") if isinstance(v, str) else v for k, v in change.as_dict().items()}


def written(tmp_path, text):
    file = tmp_path / "fix.toml"
    file.write_text(text)
    return file


CHANGE = '[[prescription.change]]\nsetting = "optimizer.eps"\nto = 1e-12\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("schema_version = 1\ncolour = 2\n", "unknown entry 'colour'"),
        ("schema_version = 2\n", "schema_version is 2"),
        ("run = 'x'\n", "schema_version is None"),
        ("schema_version = 1\nprescription = 3\n", r"\[\[prescription\]\]"),
        ("schema_version = 1\n[[prescription]]\nlr = 1\n", "prescription 1: unknown entry 'lr'"),
        ("schema_version = 1\n[[prescription]]\napply = true\n", "no .*change"),
        ("schema_version = 1\n[[prescription]]\napply = 'yes'\n", "apply is true or false"),
        ("schema_version = 1\n[[prescription]]\n[[prescription.change]]\nsetting = 'lr'\nto = 1\n", "no setting 'lr'"),
        ("schema_version = 1\n[[prescription]]\n[[prescription.effect]]\nmeasure = 'speed'\n", "no measure 'speed'"),
        ("schema_version = 1\n[[prescription]]\nconfidence = nan\n", "nan is not a number"),
        ("schema_version", "cannot be read as TOML"),
    ],
)
def test_anything_unknown_is_refused(tmp_path, text, says):
    with pytest.raises(UsageError, match=says):
        load(written(tmp_path, text))


def test_a_file_that_is_not_there_says_how_to_make_one(tmp_path):
    with pytest.raises(UsageError, match="diagnose RUN --prescription"):
        load(tmp_path / "none.toml")


def test_nothing_to_apply_is_an_error_and_so_is_a_contradiction(tmp_path):
    left_out = load(written(tmp_path, f"schema_version = 1\n[[prescription]]\napply = false\n{CHANGE}"))[0]
    with pytest.raises(UsageError, match="nothing that can be applied"):
        chosen_changes(left_out, "fix.toml")
    one = f"[[prescription]]\napply = true\n{CHANGE}"
    twice = load(written(tmp_path, f"schema_version = 1\n{one}{one.replace('1e-12', '1e-9')}"))[0]
    with pytest.raises(UsageError, match="to 1e-12 and to 1e-09; take one out"):
        chosen_changes(twice, "fix.toml")
    same = load(written(tmp_path, f"schema_version = 1\n{one}{one}"))[0]
    assert chosen_changes(same, "fix.toml") == [Change("optimizer.eps", 1e-12)]


def test_run_json_names_what_was_applied_and_only_that(tmp_path):
    one = f"[[prescription]]\ncode = 'PD503'\napply = true\n{CHANGE}"
    listed = load(written(tmp_path, f"schema_version = 1\n{one}{one.replace('true', 'false')}"))[0]
    said = statement(listed, "fix.toml", "runs/before")
    assert [p["change"] for p in said["prescriptions"]] == [[{"setting": "optimizer.eps", "to": 1e-12}]]
    read = parse({"schema_version": said["schema_version"], "prescription": said["prescriptions"]}, "run.json")
    assert read[0].changes == (Change("optimizer.eps", 1e-12),)
