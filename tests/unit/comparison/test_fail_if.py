"""The grammar of --fail-if, and what its limits do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precdoctor.comparison.baseline import Baseline, Expected, Learned
from precdoctor.comparison.fail_if import KINDS, METRIC_DOCS, RUN_METRICS, judge_limit, parse_limit
from precdoctor.comparison.summary import Summary
from precdoctor.diagnosis.analyses.shadow_errors import Piece, Shadowed
from precdoctor.errors import UsageError
from precdoctor.numerics.formats import FORMATS

FRACTIONS = ("flushed", "saturated", "zeros", "lost", "skipped")


def summary(dtype: str = "float16", **figures: object) -> Summary:
    return Summary(dtype, (4, 4), "Linear", **figures)  # type: ignore[arg-type]


TENSORS = {
    ("GPT#0", "blocks.0.attn", "output", "", 0): summary(amax=100.0, numel=100, at_max=3),
    ("GPT#0", "blocks.0.attn", "grad_output", "", 0): summary(amax=1.0, numel=100, flushed=5.0, alive=95.0, zero=10),
    ("GPT#0", "head", "output", "", 0): summary(amax=60000.0, bad_elements=2),
}
RUN = {"loss": 2.5, "skipped": 0.25}


def baseline(**metrics: float) -> Baseline:
    learned = {name: Learned(value, 0.01) for name, value in metrics.items()}
    tensors = {key: Expected("float16", (4, 4), "Linear", 0, frozenset(), learned) for key in TENSORS}
    return Baseline("b", 3, (0,), (0,), tensors, Learned(2.0, 0.1), Learned(0.0, 0.01))


def judged(text: str, base: Baseline | None = None):
    return judge_limit(parse_limit(text), TENSORS, RUN, base)


@given(
    st.sampled_from([m for m in METRIC_DOCS if m not in (*RUN_METRICS, "rounding")]),
    st.none() | st.sampled_from(KINDS),
    st.text(st.characters(codec="ascii", categories=["L", "N"], include_characters=".*?[]"), min_size=1),
    st.floats(0, 1),
    st.booleans(),
)
def test_what_is_written_is_what_is_read(metric, kind, glob, value, relative):
    text = f"{metric}{'.' + kind if kind else ''}:{glob}:{'+' if relative else ''}{value!r}"
    limit = parse_limit(text)
    assert (limit.metric, limit.kind, limit.glob, limit.value, limit.relative) == (metric, kind, glob, value, relative)


@given(st.text())
def test_any_text_is_a_limit_or_one_sentence(text):
    try:
        parse_limit(text)
    except UsageError as error:
        assert "--fail-if" in str(error)


def test_percent_and_plus():
    assert parse_limit("flushed:*:2%").value == parse_limit("flushed:*:0.02").value == 0.02
    assert parse_limit("amax.output:blocks.*:1e4").value == 1e4
    assert parse_limit("rms:*:-3.5").value == -3.5
    assert parse_limit("skipped:*:+10 %").relative


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("flushed", "METRIC:MODULE_GLOB:LIMIT"),
        ("flushed:0.1", "METRIC:MODULE_GLOB:LIMIT"),
        ("flushed::1%", "METRIC:MODULE_GLOB:LIMIT"),
        ("flushd:*:1%", "did you mean 'flushed'?"),
        ("flushed.outputs:*:1%", "did you mean 'output'?"),
        ("flushed:*:lots", "'lots' is not a limit"),
        ("flushed:*:2", "for percent write 2%"),
        ("headroom:*:3%", "headroom is no fraction"),
        ("loss:blocks.*:3", "write loss:*:3"),
    ],
)
def test_mistakes_are_told(text, words):
    with pytest.raises(UsageError) as caught:
        parse_limit(text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "failing"),
    [
        ("amax:blocks.*:99", ["GPT#0 blocks.0.attn output (amax)"]),
        ("amax:blocks.*:100", []),
        ("amax.grad_output:*:0.5", ["GPT#0 blocks.0.attn grad_output (amax)"]),
        ("flushed:*:4%", ["GPT#0 blocks.0.attn grad_output (flushed)"]),
        ("flushed:*:5%", []),
        ("headroom:*:1", ["GPT#0 head output (headroom)"]),
        ("headroom:*:0.1", []),
        ("nonfinite:*:0", ["GPT#0 head output (nonfinite)"]),
        ("loss:*:2.4", ["the median loss over the last quarter of the steps (loss)"]),
        ("skipped:*:30%", []),
    ],
)
def test_limits(text, failing):
    lines = judged(text)
    assert lines
    assert [line.subject for line in lines if not line.passed] == failing
    assert all((line.excess > 1.0) == (not line.passed) for line in lines)


def test_relative_to_the_baseline():
    base = baseline(flushed=0.04, headroom=9.5)
    assert [x.passed for x in judged("flushed:blocks.*:+0.5%", base) if "grad" in x.subject] == [False]
    assert [x.passed for x in judged("flushed:blocks.*:+2%", base) if "grad" in x.subject] == [True]
    lost = {x.subject: x.passed for x in judged("headroom:*:+2", base)}
    assert lost["GPT#0 blocks.0.attn output (headroom)"] and not lost["GPT#0 head output (headroom)"]
    assert not judged("loss:*:+0.4", base)[0].passed
    assert judged("loss:*:+0.6", base)[0].passed
    with pytest.raises(UsageError, match="relative to a baseline"):
        judged("flushed:*:+1%")


def test_a_limit_that_is_never_checked_is_an_error():
    with pytest.raises(UsageError, match=r"no module matches 'blokcs\.0\.attn'; did you mean 'blocks\.0\.attn'"):
        judged("amax:blokcs.0.attn:1")
    with pytest.raises(UsageError, match="no tensor of kind update"):
        judged("lost.update:head:1%")


def test_every_metric_is_on_the_page():
    from pathlib import Path

    page = (Path(__file__).resolve().parents[3] / "docs" / "commands" / "gate.md").read_text()
    assert {m for m in METRIC_DOCS if f"`{m}`" not in page} == {k for k in KINDS if f"`{k}`" not in page} == set()


def piece(module: str, local: float, kind: str = "output") -> Piece:
    return Piece("GPT#0", module, "Linear", None, kind, "", "bfloat16", 0, 0, local, local, None)


SHADOW = Shadowed("float32", FORMATS["BF16"], (0, 4), (piece("blocks.0.norm", 20 / 256), piece("head", 0.5 / 256)))


@pytest.mark.parametrize(("text", "failed"), [
    ("rounding:*:4", ["blocks.0.norm"]), ("rounding:head:4", []), ("rounding:*:0.1", ["blocks.0.norm", "head"]),
    ("rounding:blocks.*:21", []),
])  # fmt: skip
def test_rounding_is_a_modules_own_error_in_units_of_its_format(text, failed):
    lines = judge_limit(parse_limit(text), {}, {}, None, SHADOW)
    assert [line.module for line in lines if not line.passed] == failed


@pytest.mark.parametrize(("text", "shadow", "says"), [
    ("rounding:*:4", None, "precdoctor shadow"), ("rounding:haed:4", SHADOW, "did you mean 'head'"),
    ("rounding:*:+4", SHADOW, "leave out the plus"),
])  # fmt: skip
def test_a_limit_on_rounding_that_cannot_be_checked_is_an_error(text, shadow, says):
    with pytest.raises(UsageError, match=says):
        judge_limit(parse_limit(text), {}, {}, baseline() if "+" in text else None, shadow)


def test_rounding_has_no_kinds():
    with pytest.raises(UsageError, match="rounding:blocks"):
        parse_limit("rounding.output:blocks.*:4")
