from __future__ import annotations

import dataclasses
import io
import os
import re
from pathlib import Path

import pytest

import precdoctor
from precdoctor.diagnosis.claims.finding import (
    Diagnosis,
    Finding,
    Location,
    Prescription,
    RuleOutcome,
    Severity,
    Source,
    Status,
)
from precdoctor.reporting.console import PIPED_WIDTH, make_console
from precdoctor.reporting.terminal import FULL_FINDINGS, print_concise, print_full, verdict_line
from tests.support.diagnoses import BROKEN, CLEAN, OVERFLOW, UNDERFLOW, UNKNOWN
from tests.support.hostile import NAMES
from tests.support.offenders import check_each

GOLDEN = Path(__file__).parent / "golden"
CASES = {"broken": BROKEN, "clean": CLEAN, "unknown": UNKNOWN}


def printed(diagnosis, printer=print_full, width=None, file=None, **options):
    file = file or io.StringIO()
    printer(diagnosis, make_console(file, width), **options)
    return file.getvalue()


@pytest.mark.parametrize("width", [80, 140])
@pytest.mark.parametrize("name", CASES)
def test_the_screen_is_as_agreed(name, width):
    """Look at a changed screen as a tired person would; PRECDOCTOR_GOLDEN=write keeps it."""
    text = printed(CASES[name], width=width)
    file = GOLDEN / f"{name}-{width}.txt"
    if os.environ.get("PRECDOCTOR_GOLDEN") == "write":
        file.write_text(text)
    assert text == file.read_text()
    assert max(map(len, text.splitlines())) <= width
    assert not re.search(r" +$", text, flags=re.MULTILINE)


def test_concise_is_one_line_per_finding_and_a_sum():
    lines = printed(BROKEN, print_concise).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("PD101 error: ") and "step 37" in lines[0]
    assert lines[-1] == "1 error, 1 warning; 1 rule could not be judged"


def test_many_findings_end_in_one_line_each():
    many = dataclasses.replace(BROKEN, findings=(OVERFLOW,) * (FULL_FINDINGS + 5))
    text = printed(many)
    assert "5 more findings:" in text
    assert text.count("seen at") == FULL_FINDINGS


def test_notes_take_two_lines_and_come_last():
    note = dataclasses.replace(UNDERFLOW, severity=Severity.INFO, code="PD505", title="a note")
    text = printed(dataclasses.replace(BROKEN, findings=(OVERFLOW, note)))
    assert f"INFO PD505  a note\n  do        {note.prescriptions[0].title}\n" in text
    assert text.index("ERROR PD101") < text.index("INFO PD505")
    assert note.message not in text
    assert "precdoctor diagnose --select PD505" in text and "precdoctor explain PD101" in text


def test_a_note_that_was_asked_for_is_told_in_full():
    note = dataclasses.replace(UNDERFLOW, severity=Severity.INFO)
    text = printed(dataclasses.replace(BROKEN, findings=(note,), rules=BROKEN.rules[:1]), width=1000)
    assert note.message in text


def test_verdict_in_words():
    assert verdict_line(CLEAN) == "No findings"
    assert verdict_line(UNKNOWN) == "No findings; 1 rule could not be judged"


def test_piped_output_has_no_colours_and_a_fixed_width(monkeypatch):
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    text = printed(BROKEN)
    assert "\x1b" not in text
    assert make_console(io.StringIO()).width == PIPED_WIDTH


def test_force_color_and_no_color(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[" in printed(BROKEN)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", printed(BROKEN))


def test_a_terminal_without_unicode_gets_ascii():
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace")
    print_full(BROKEN, make_console(file))
    file.flush()
    text = file.buffer.getvalue().decode("ascii")
    assert "|" in text and "> blocks.3.attn" in text and "steps 0-37" in text
    assert "\\u" not in text


def hostile(name: str) -> Diagnosis:
    """A diagnosis in which everything that can come from a log is ``name``."""
    entry = {
        "module": name,
        "kind": name,
        "name": name,
        "dtype": name,
        "amax": 1.0,
        "headroom_binades": 1.0,
        "nan": 0,
        "inf": 0,
    }
    finding = Finding(
        "PD101", "nonfinite-origin-forward", Severity.ERROR, 0.5, f"title {name}", f"message {name}",
        Location(name, name, name, name, None, 0, 0, name, Source(name, 1, name)), name,
        {"path": [entry], "range": {"dtype": name}, "confidence_reason": name, "detected_at": Source(name, 1, name)},
        (Prescription(f"do {name}", {name: name}, {name: name}, f"snippet {name}"),),
    )  # fmt: skip
    outcomes = (RuleOutcome("PD103", "nonfinite-loss", Status.INDETERMINATE, name),)
    run = {"path": name, "command": [name, name], "device": name}
    return Diagnosis(run, (finding,), outcomes, {"overhead_fraction": 0.1, "dropped": {name: 3}, "errors": [name]})


@pytest.mark.parametrize("printer", [print_full, print_concise])
def test_hostile_names_are_shown_and_do_nothing(printer):
    check_each(lambda name: check_printed(name, printer), NAMES, repr)


def check_printed(name, printer):
    text = printed(hostile(name), printer, width=120)
    assert not re.search(
        "[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]", text
    )
    assert not any(line.lstrip().startswith("::") or "##[" in line or "##vso[" in line for line in text.splitlines())
    text.encode("utf-8")
    if name.startswith("["):  # markup is text
        assert name in text.replace("\n", "")


def test_values_of_the_wrong_type_do_not_break_the_screen():
    odd = dataclasses.replace(
        OVERFLOW,
        evidence={"path": "no list", "range": 3, "history": [1, 2], "detected_at": "x", "last_finite_step": "soon"},
        prescriptions=(
            Prescription("x", {}, {"a": None, "b": [1, float("nan")], "c": {"from": None, "to": float("inf")}}, ""),
        ),
    )
    assert "predicted: b 1 to NaN, c – to Infinity" in printed(dataclasses.replace(BROKEN, findings=(odd,)))


def test_rules_that_do_not_apply_for_one_reason_share_a_line():
    codes = ("PD401", "PD402", "PD403", "PD404", "PD408", "PD501")
    absent = [RuleOutcome(c, "name", Status.NOT_APPLICABLE, "no FP8" if c < "PD5" else "all FP32") for c in codes]
    text = printed(dataclasses.replace(CLEAN, rules=tuple(absent)), verbose=True)
    assert re.search(r"PD401-PD404, PD408 +no FP8", text)
    assert re.search(r"PD501 +all FP32", text)
    assert "Checked, in this order" not in text


@pytest.mark.parametrize(
    ("location", "cause", "cwd", "offered"),
    [
        ({"op": None}, None, "/work", True),
        ({"op": "aten.log.default"}, None, "/work", False),
        ({"op": None}, "log-of-nonpositive", "/work", False),
        ({"op": None}, None, None, False),
    ],
)
def test_a_second_run_is_offered_where_the_op_is_not_known(location, cause, cwd, offered):
    found = dataclasses.replace(OVERFLOW, location=dataclasses.replace(OVERFLOW.location, **location), cause=cause)
    run = {**BROKEN.run, "path": "runs/my model", "cwd": cwd}
    text = printed(dataclasses.replace(BROKEN, run=run, findings=(found,)))
    assert ("To find the op, run the command again, traced: precdoctor autopsy 'runs/my model'\n" in text) == offered
    assert text.count("autopsy") == offered


def test_no_second_run_is_offered_where_one_was_traced():
    place, run = dataclasses.replace(OVERFLOW.location, op=None), {**BROKEN.run, "path": "run", "cwd": "/work"}
    found = dataclasses.replace(OVERFLOW, location=place, cause=None, evidence={**OVERFLOW.evidence, "traced": True})
    assert "autopsy" not in printed(dataclasses.replace(BROKEN, run=run, findings=(found,)))


@pytest.mark.parametrize(
    ("made_by", "offered"), [("after-loader", True), ("unknown", True), ("loader", False), ("outside-step", False)]
)
def test_a_second_run_is_offered_where_code_may_have_spoilt_the_batch(made_by, offered):
    place = dataclasses.replace(OVERFLOW.location, op=None)
    found = dataclasses.replace(
        OVERFLOW,
        code="PD104",
        location=place,
        cause="nonfinite-input-batch",
        evidence={**OVERFLOW.evidence, "provenance": made_by},
    )
    text = printed(dataclasses.replace(BROKEN, run={**BROKEN.run, "path": "run", "cwd": "/work"}, findings=(found,)))
    assert ("precdoctor autopsy run" in text) == offered


def test_a_clean_run_is_five_lines():
    text = printed(CLEAN, width=80)
    assert len(text.splitlines()) == 5
    assert "No findings. 4 rules checked, 1 not applicable; `--verbose` lists them.\n" in text


def test_every_rule_is_listed_when_asked_for():
    text = printed(CLEAN, width=80, verbose=True)
    assert all(r.code in text for r in CLEAN.rules) and "--verbose" not in text
    assert all(r.code in printed(BROKEN, verbose=True) for r in BROKEN.rules)


def test_a_snippet_is_never_wrapped():
    line = "raise ValueError(f'the data holds non-finite samples: {bad.nonzero().flatten().tolist()}')"
    code = f"if bad.any():\n    {line}\n"
    finding = BROKEN.findings[0]
    long = dataclasses.replace(finding.prescriptions[0], snippet=code)
    text = printed(
        dataclasses.replace(BROKEN, findings=(dataclasses.replace(finding, prescriptions=(long,)),)), width=60
    )
    assert f"\n    if bad.any():\n        {line}\n" in text


def test_few_steps_with_full_statistics_are_no_clean_run_either():
    run = {**CLEAN.run, "first_step": 0, "last_step": 90, "steps": 90, "sampled_steps": 2}
    assert "No findings, but 2 steps with full statistics are too few to judge." in " ".join(
        printed(dataclasses.replace(CLEAN, run=run)).split()
    )


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (1, "No findings, but 1 step is too few to judge."),
        (7, "No findings, but 7 steps are too few to judge."),
        (8, "No findings."),
    ],
)
def test_a_run_too_short_to_judge_is_no_clean_one(steps, said):
    run = {**CLEAN.run, "first_step": 0, "last_step": steps - 1, "steps": steps}
    assert f"{said} 4 rules checked" in " ".join(printed(dataclasses.replace(CLEAN, run=run)).split())
    assert printed(dataclasses.replace(BROKEN, run={**BROKEN.run, "steps": steps})).count("too few") == 0


@pytest.mark.parametrize(
    ("title", "change", "predicted"),
    [
        ("eps=1e-12: below it 41 % -> 0 %", "eps=1e-12", "below it 41 % -> 0 %"),
        ("a scale: to 3 -> 4: lost 2 % -> 1 %", "a scale: to 3 -> 4", "lost 2 % -> 1 %"),
        ("allow_tf32 True -> False", "allow_tf32 True -> False", "overflow 2 to 0"),
        ("x: as the paper has it", "x: as the paper has it", "overflow 2 to 0"),
    ],
)
def test_figures_that_are_predicted_say_so_once(title, change, predicted):
    prescription = Prescription(title, {}, {"overflow": {"from": 2, "to": 0}}, "")
    found = dataclasses.replace(OVERFLOW, prescriptions=(prescription,))
    for severity in (Severity.ERROR, Severity.INFO):
        shown = dataclasses.replace(BROKEN, findings=(dataclasses.replace(found, severity=severity),))
        text = printed(shown)
        assert f"do        {change}\n            predicted: {predicted}\n" in text


def test_no_message_offers_the_second_run_that_the_last_lines_offer():
    texts = [path.read_text() for path in (Path(precdoctor.__file__).parent / "diagnosis").rglob("*.py")]
    assert not [text for text in texts if re.search(r"(?<!`)`precdoctor autopsy", text)]


def test_a_tensors_own_name_is_not_read_as_a_kind():
    """`logits` is also a kind of tensor, with words of its own."""
    path = [{**OVERFLOW.evidence["path"][-1], "kind": "output", "name": "logits"}]
    text = printed(only(OVERFLOW, evidence={**OVERFLOW.evidence, "path": path}), width=140)
    assert "output logits" in text
    assert "softmax input" not in text


def test_code_outside_modules_is_placed_at_its_root():
    around = dataclasses.replace(OVERFLOW.location, module=None, module_class=None, kind="input")
    assert "where     code around GPT#0, forward, step 37" in printed(only(OVERFLOW, location=around), width=140)


def only(finding, **changes):
    return dataclasses.replace(BROKEN, findings=(dataclasses.replace(finding, **changes),))
