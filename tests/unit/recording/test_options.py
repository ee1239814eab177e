from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precdoctor.errors import UsageError
from precdoctor.recording.options import POLICIES, RecordOptions
from precdoctor.runlog.changes import Change
from tests.unit.runlog.test_changes import changes

#: What the command line can hand over: file names and module globs may hold any character, undecodable bytes included.
GLOBS = st.lists(st.text(), max_size=4).map(tuple)
STEPS = st.tuples(st.none() | st.integers(0, 1 << 60), st.none() | st.integers(1, 1 << 60)).filter(
    lambda ends: ends[1] is None or ends[1] > (ends[0] or 0)
)
OPTIONS = st.builds(
    RecordOptions,
    every=st.none() | st.integers(0, 40).map(lambda n: 1 << n),
    budget=st.floats(0, 1, exclude_min=True),
    ranks=st.none() | st.lists(st.integers(0, 1 << 20), min_size=1, max_size=4).map(tuple),
    kinds=st.lists(st.sampled_from(["output", "weight"]), max_size=2).map(tuple),
    steps=STEPS,
    include=GLOBS,
    exclude=GLOBS,
    first_step=st.integers(0, 1 << 60),
    on_nonfinite=st.sampled_from(POLICIES),
    arm_next=st.integers(0, 1 << 30),
    deep_scan=st.none() | st.integers(0, 1 << 30),
    compiled=st.sampled_from(["boundary", "instrument"]),
    max_steps=st.none() | st.integers(1, 1 << 30),
    ops=st.lists(st.integers(0, 1 << 60), max_size=3).map(tuple),
    trace_steps=st.none() | st.tuples(st.integers(0, 1 << 30), st.integers(0, 1 << 30)),
    scene_memory=st.integers(0, 1 << 60),
    max_disk=st.none() | st.integers(0, 1 << 60),
    redact_names=st.booleans(),
    inference=st.booleans(),
    strict=st.booleans(),
    apply=st.lists(changes().map(Change.as_dict), max_size=3).map(tuple),
    may_halt=st.booleans(),
    shadow=st.sampled_from([None, "fp32", "fp64"]),
    shadow_at=st.lists(st.integers(0, 1 << 60), max_size=3).map(tuple),
    shadow_every=st.none() | st.integers(1, 1 << 60),
    shadow_steps=STEPS,
)


@given(OPTIONS)
def test_options_come_through_the_environment_unchanged(options):
    text = options.to_json()
    text.encode("ascii")  # whatever locale the child runs in
    assert "\n" not in text
    assert RecordOptions.from_json(text) == options


def test_every_option_is_covered_above():
    fields = {field.name for field in dataclasses.fields(RecordOptions)}
    assert fields == {
        "shadow",
        "shadow_at",
        "shadow_every",
        "shadow_steps",
        "every",
        "arm_next",
        "deep_scan",
        "max_steps",
        "ops",
        "compiled",
        "budget",
        "ranks",
        "kinds",
        "steps",
        "include",
        "exclude",
        "first_step",
        "scene_memory",
        "max_disk",
        "on_nonfinite",
        "redact_names",
        "inference",
        "strict",
        "apply",
        "may_halt",
        "trace_steps",
    }


def test_options_of_a_newer_parent_are_passed_over():
    assert RecordOptions.from_json('{"every": 4, "from_the_future": [1]}') == RecordOptions(every=4)


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '{"every": "x"}', '{"budget": null}', '{"steps": [1]}'])
def test_anything_else_is_refused_in_one_sentence(text):
    with pytest.raises(UsageError, match=r"^PRECDOCTOR_OPTIONS does not hold recorder options: "):
        RecordOptions.from_json(text)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"every": 0}, "--every takes a power of two"),
        ({"every": 12}, "got 12"),
        ({"budget": 0}, "--budget takes a percentage above 0"),
        ({"budget": 1.5}, "got 150"),
        ({"ranks": ()}, "--ranks takes all, or ranks from 0"),
        ({"ranks": (-1,)}, "--ranks takes all, or ranks from 0"),
        ({"steps": (5, 5)}, "got 5:5"),
        ({"steps": (-1, None)}, "--steps takes a half-open range"),
        ({"deep_scan": -1}, "--deep-scan takes a number of steps, or off, got -1"),
        ({"ops": (3, -1)}, "--ops takes step numbers from 0, got -1"),
        ({"compiled": "inside"}, "--compiled takes boundary or instrument, got 'inside'"),
        ({"first_step": -1}, "--first-step takes a step number from 0, got -1"),
    ],
)
def test_values_that_cannot_be_taken(fields, complaint):
    with pytest.raises(UsageError, match=complaint):
        RecordOptions(**fields)


def test_the_json_is_what_run_json_shows():
    assert json.loads(RecordOptions(steps=(None, 9)).to_json())["steps"] == [None, 9]
