"""The truth about the fault corpus is well-formed. Whether it is *true* is for the oracle (tests/integration)."""

import ast

import pytest

from benchmarks.faults.score import Answer, Result, verdicts
from benchmarks.faults.truth import CAUSES, HALVES, PHASES, PRECISIONS, SCRIPTS, base_name, load
from precdoctor.diagnosis import registry

TRUTHS = load()
FAULTY = [t for t in TRUTHS if t.faulty]


def names(truths):
    return [t.name for t in truths]


def test_every_script_has_truth_and_every_truth_a_script():
    mains = {p for p in SCRIPTS.rglob("*.py") if p.parent == SCRIPTS or p.name == "train.py"}

    assert {t.script for t in TRUTHS} == mains
    assert len(set(names(TRUTHS))) == len(TRUTHS)


@pytest.mark.parametrize("half", HALVES)
def test_halves_are_of_about_the_same_size(half):
    mine = load(half)

    assert sum(t.faulty for t in mine) >= 20
    assert sum(not t.faulty for t in mine) >= 7


def test_every_cause_and_phase_occurs():
    assert {t.cause for t in FAULTY} == set(CAUSES)
    assert {t.phase for t in FAULTY} == set(PHASES)
    assert {t.precision for t in FAULTY} == set(PRECISIONS)


@pytest.mark.parametrize("truth", FAULTY, ids=names(FAULTY))
def test_truth_is_complete(truth):
    assert truth.fault
    assert truth.causes <= set(CAUSES)
    assert truth.phase in PHASES
    assert truth.precision in PRECISIONS
    assert truth.code in {r.code for r in registry.RULES}
    assert truth.step is not None
    assert (truth.forward_op is not None) == (truth.phase == "backward")
    if truth.phase != "data" and truth.cause != "nonfinite-weights":
        assert truth.op
        assert truth.lines()


@pytest.mark.parametrize("script", sorted(SCRIPTS.rglob("*.py")), ids=lambda p: str(p.relative_to(SCRIPTS)))
def test_script_is_a_users_own(script):
    """It knows nothing of who reads it, runs on Python 3.10, and is seeded."""
    code = script.read_text()

    assert "precdoctor" not in code
    assert "fault" not in code.lower().replace("default", "")
    ast.parse(code, feature_version=(3, 10))
    if script in {t.script for t in TRUTHS}:
        assert "torch.manual_seed(" in code


@pytest.mark.parametrize(
    ("op", "base"),
    [
        ("aten._foreach_addcdiv_.ScalarList", "addcdiv"),
        ("aten.div.Tensor", "div"),
        ("torch.ops.aten::sqrt", "sqrt"),
        ("aten._softmax.default", "softmax"),
        ("log_softmax", "log_softmax"),
    ],
)
def test_base_name(op, base):
    assert base_name(op) == base


def test_scoring():
    truth = next(t for t in TRUTHS if t.name == "gpt_chars")
    right = Answer("PD101", "forward", "GPT#0", "h.1.attn", "aten.bmm.default", "x/gpt_chars.py", truth.lines()[0])
    other = Answer("PD103", "loss", "GPT#0", "", None, "gpt_chars.py", 1, "exp-overflow")

    both = verdicts(Result(truth, (other, right), 1.0))

    assert verdicts(Result(truth, (right,), 1.0)) == dict.fromkeys(both, True) | {"cause": False}
    assert both == dict.fromkeys(both, False) | {"found": True, "family": True, "module@3": True}
    assert not any(verdicts(Result(truth, (), 1.0)).values())
