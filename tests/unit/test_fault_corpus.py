"""The truth about the fault corpus is well-formed. Whether it is *true* is for the oracle (tests/integration)."""

import ast
import re

import pytest

from benchmarks.faults import mutations
from benchmarks.faults.score import Answer, Result, verdicts
from benchmarks.faults.truth import (
    CAUSES,
    HERE,
    NAN_SETS,
    PHASES,
    PRECISIONS,
    SCRIPTS,
    SETS,
    SUBJECTS,
    base_name,
    load,
)
from precdoctor.diagnosis import registry
from tests.support.offenders import check_each

TRUTHS = load()
FAULTY = [t for t in TRUTHS if t.faulty]
QUIET_TRUTHS = [t for t in load("every") if t.quiet]
QUIET_FAULTY = [t for t in QUIET_TRUTHS if t.faulty]
MUTATIONS = [m for which in mutations.SETS for m in mutations.load(which)]


def name_of(truth):
    return truth.name


def test_every_script_has_truth_and_every_truth_a_script():
    folders = {SCRIPTS / subject for subject in SUBJECTS}
    mains = {p for p in SCRIPTS.rglob("*.py") if p.parent in folders or p.name == "train.py"}
    truths = load("every")

    assert {t.script for t in truths} == mains
    assert {p.name for p in SCRIPTS.iterdir()} == set(SUBJECTS)


def test_no_two_scripts_have_one_file_name():
    """Tables name a script by it, and ``--only`` picks it out."""
    own = [t.name.removesuffix("/train").partition("/")[2] for t in load("every")]

    assert {n for n in own if own.count(n) > 1} == set()


def test_a_script_lies_where_its_code_belongs():
    families = dict(zip("1234567", SUBJECTS, strict=False))

    assert {t.name: t.set_name for t in load("every") if t.set_name not in SETS} == {}
    assert {t.name for t in TRUTHS + QUIET_TRUTHS if t.name.split("/")[0] != (
        families[t.code[2]] if t.faulty else "healthy")} == set()  # fmt: skip


def test_the_table_of_provenance_counts_every_set():
    table = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \|", (HERE / "README.md").read_text(), re.MULTILINE)
    sets = {name: load(name) for name in SETS}

    assert [(name, int(faulty), int(healthy)) for name, faulty, healthy in table] == [
        (name, sum(t.faulty for t in mine), sum(not t.faulty for t in mine)) for name, mine in sets.items()
    ]


@pytest.mark.parametrize("set_name", NAN_SETS)
def test_sets_are_of_about_the_same_size(set_name):
    mine = load(set_name)

    assert sum(t.faulty for t in mine) >= 14
    assert sum(not t.faulty for t in mine) >= 6


def test_every_cause_and_phase_occurs():
    assert {t.cause for t in FAULTY} == set(CAUSES)
    assert {t.phase for t in FAULTY} == set(PHASES)
    assert {t.precision for t in FAULTY} == set(PRECISIONS)


def test_truth_is_complete():
    check_each(check_truth, FAULTY, name_of)


def check_truth(truth):
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


def test_the_quiet_set_is_large_enough():
    mine = load("quiet")

    assert sum(t.faulty for t in mine) >= 25
    assert sum(not t.faulty for t in mine) >= 10
    assert {t.code[:3] for t in mine if t.faulty} >= {"PD2", "PD3", "PD4", "PD5", "PD6"}


def test_truth_of_quiet_faults_is_complete():
    check_each(check_quiet_truth, QUIET_FAULTY, name_of)


def check_quiet_truth(truth):
    """What was meant, where it may be named, and what the oracle has to find there and not in the twin."""
    scope, _, gauge = truth.gauge.partition(".")

    assert truth.fault
    assert truth.precision in {*PRECISIONS, "fp8"}
    assert all(re.fullmatch(r"PD[1-7]\d\d", code) for code in truth.codes)
    assert scope == "run" or (scope == "modules" and (truth.modules or truth.where))
    assert gauge
    assert (gauge == "probe") == (truth.probe is not None)
    assert truth.script_range[0] <= truth.script_range[1]
    assert truth.script_range != truth.twin_range


def test_the_words_that_mend_a_script_are_in_it_once():
    check_each(check_mend, QUIET_TRUTHS, name_of)


def check_mend(truth):
    source = truth.script.read_text()

    assert [source.count(old) for old, _ in truth.mend] == [1] * len(truth.mend)


def test_a_mutation_is_one_measured_edit_of_a_healthy_script():
    check_each(check_mutation, MUTATIONS, name_of)


def check_mutation(mutation):
    ast.parse(mutation.text())  # raises if the old text is not in the script once

    assert mutation.script.startswith("healthy/")
    assert mutation.kind in mutations.KINDS
    assert mutation.breaks
    assert mutation.harm
    assert set(mutation.codes) <= {r.code for r in registry.RULES}


def test_scripts_are_a_users_own():
    mains = {t.script for t in load("every")}
    check_each(lambda script: check_script(script, main=script in mains), sorted(SCRIPTS.rglob("*.py")))


def check_script(script, *, main):
    """It knows nothing of who reads it, runs on Python 3.10, and is seeded."""
    code = script.read_text()

    assert "precdoctor" not in code
    assert "fault" not in code.lower().replace("default", "")
    ast.parse(code, feature_version=(3, 10))
    if main:
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
    truth = next(t for t in TRUTHS if t.name == "nonfinite/gpt_chars")
    right = Answer("PD101", "forward", "GPT#0", "h.1.attn", "aten.bmm.default", "x/gpt_chars.py", truth.lines()[0])
    other = Answer("PD103", "loss", "GPT#0", "", None, "gpt_chars.py", 1, "exp-overflow")

    both = verdicts(Result(truth, (other, right), 1.0))

    assert verdicts(Result(truth, (right,), 1.0)) == dict.fromkeys(both, True) | {"cause": False}
    assert both == dict.fromkeys(both, False) | {"found": True, "family": True, "module@3": True}
    assert not any(verdicts(Result(truth, (), 1.0)).values())


def test_scoring_of_a_quiet_fault():
    truth = next(t for t in QUIET_TRUTHS if t.name == "underflow/ddpm_minsnr")
    right = Answer("PD303", "backward", "UNet#0", "mid.conv1")
    other = Answer("PD501", None, "UNet#0", "time.0")

    assert verdicts(Result(truth, (right,), 1.0)) == {
        **dict.fromkeys(("found", "family", "code", "module@1", "module@3"), True),
        **dict.fromkeys(("phase", "op", "line", "cause")),
    }
    assert [q for q, v in verdicts(Result(truth, (other, right), 1.0)).items() if v] == ["found", "module@3"]


def test_a_scaler_has_no_module():
    truth = next(t for t in QUIET_TRUTHS if t.name == "loss_scaling/moe_eager_growth")

    assert verdicts(Result(truth, (Answer("PD302"),), 1.0))["module@1"] is None
