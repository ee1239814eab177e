"""Documents and columns that hold what nobody writes: one of our errors, or a diagnosis in which no rule failed."""

import json
import logging
import random
import shutil
from pathlib import Path

import pytest

from precdoctor.diagnosis import diagnose, engine
from precdoctor.diagnosis.ranking.verdict import ExitCode, exit_code
from precdoctor.errors import CorruptRunError, PrecdoctorError
from precdoctor.runlog import documents, open_run
from tests.support.runs import write_run

SAMPLES = sorted(Path(__file__).parents[2].glob("sample_runs/*/run"))
WRONG = [None, 0, -1, 1 << 63, 1e300, "x", "", [], {}, [[]], True, [1], {"a": 1}, "NaN", -5.5, [None], 10**400]


def places(value, place=()):
    """Every place of a document but its root."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, held in inner:
        yield (*place, key)
        yield from places(held, (*place, key))


def spoiled(document, rng):
    """A document with one to four values exchanged."""
    found = list(places(document))
    for place in rng.sample(found, min(len(found), rng.choice([1, 1, 2, 4]))):
        at = document
        try:
            for key in place[:-1]:
                at = at[key]
            at[place[-1]] = rng.choice(WRONG)
        except (KeyError, IndexError, TypeError):
            pass  # what holds it has been exchanged before
    return document


@pytest.mark.parametrize("count", [4, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("document", ["run.json", "rank-00000/rank.json", "rank-00000/end.json"])
def test_no_value_of_a_document_makes_a_rule_fail(tmp_path, document, count, caplog):
    rng, failures = random.Random(document), []
    for number in range(count):
        run = shutil.copytree(rng.choice(SAMPLES), tmp_path / str(number))
        content = spoiled(json.loads((run / document).read_text()), rng)
        (run / document).write_text(json.dumps(content))
        caplog.clear()
        try:
            failures += [(number, r.code, caplog.text[-500:]) for r in diagnose(run).rules if r.defect]
        except PrecdoctorError as error:
            assert "\n" not in str(error)
    assert failures == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"roots": [{"name": "M#0", "modules": ["x"]}]}, r"roots\[0\].modules\[0\] is a string, not an object"),
        ({"roots": [{"modules": []}]}, r"roots\[0\].name is missing"),
        ({"roots": [{"name": "M#0", "parameters": [{"name": "w", "shape": 3}]}]}, "shape is an integer, not a list"),
        ({"roots": [{"name": "M#0", "parameters": [{"name": "w", "shape": [10**400]}]}]}, "not an integer of 64 bits"),
        ({"roots": [{"name": "M#0", "parameters": [{"name": "w", "shape": [1] * 65}]}]}, "has 65 entries"),
        ({"optimizers": [{"name": "SGD#0", "groups": ["lr"]}]}, r"groups\[0\] is a string, not an object"),
        ({"optimizers": [{"name": "SGD#0", "groups": [{"lr": 10**400}]}]}, "lr is an integer, not a value"),
        ({"scalers": [None]}, r"scalers\[0\] is null"),
        ({"versions": {"torch": 2}}, "versions.torch is an integer, not a string"),
        ({"versions": {"torch": "x" * (1 << 21)}}, "versions.torch is a string, not a string of at most"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_with_a_document_is_said(tmp_path, change, said):
    run = write_run(tmp_path / "run", steps=[{"step": 0}], facts=change)
    with pytest.raises(CorruptRunError, match=said) as caught:
        diagnose(run)
    assert "rank-00000/rank.json is damaged" in str(caught.value)


def test_what_precdoctor_writes_is_taken():
    for run in SAMPLES:
        assert open_run(run).ranks[0].facts["roots"]
    documents.check({"unknown": object(), "roots": None}, documents.RANK)


@pytest.mark.parametrize(
    "wrong",
    [{"amax": -1.0}, {"amax": float("inf")}, {"amax": float("nan")}, {"zero": -7}, {"numel": -1}, {"exp_lo": 1 << 30},
     {"exp_hist": [1, -5], "exp_lo": 0}, {"shape": [-1]}, {"call": -1}, {"block32_amax_lo": -400}],
    ids=str,
)  # fmt: skip
def test_a_value_that_cannot_be_measured_makes_the_part_damaged(tmp_path, wrong):
    run = open_run(write_run(tmp_path / "run", [{"step": 0}, {"step": 1, **wrong}]))
    with pytest.raises(CorruptRunError, match=f"column '{next(iter(wrong))}' holds"):
        run.tensors()


def test_event_data_nested_deeply_are_none(tmp_path):
    data = '{"a":' * 100_000 + "1" + "}" * 100_000
    event = {"event": "scan", "step": 0, "data": data}
    run = write_run(tmp_path / "run", steps=[{"step": 0, "loss": 1.0}], events=[event])
    assert not any(r.defect for r in diagnose(run).rules)


def test_a_rule_that_fails_is_named_and_the_others_stand(tmp_path, monkeypatch, caplog):
    run = write_run(tmp_path / "run", steps=[{"step": 0, "loss": float("nan"), "non_finite": 1}])
    whole = diagnose(run)

    def fails(view, options):
        raise KeyError("amax")

    broken = [r if r.code != "PD301" else type(r)(**{**vars(r), "check": fails}) for r in engine.RULES]
    with caplog.at_level(logging.ERROR):
        found = engine.diagnose_view(engine.view_of(open_run(run)), broken, engine.resolve_options({}))
    assert [f.code for f in found.findings] == [f.code for f in whole.findings] == ["PD103"]
    (outcome,) = [r for r in found.rules if r.defect]
    assert outcome.code == "PD301" and "KeyError in precdoctor; please report it" in outcome.reason
    assert "PD301" in caplog.text and "KeyError" in caplog.text
    assert exit_code(found, None) == exit_code(found, "error") == ExitCode.UNTRUSTWORTHY
    assert exit_code(whole, "error") == ExitCode.FINDINGS
