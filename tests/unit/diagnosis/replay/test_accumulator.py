"""Which sums a model makes, and that their errors are those of the model of accumulation."""

from __future__ import annotations

import pytest

from precdoctor.diagnosis.offline.replay.accumulator import replay_accumulator
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.errors import NothingRecordedError
from precdoctor.numerics.accumulation import Accumulator, Operands, accumulation_error
from precdoctor.runlog import open_run
from tests.support.runs import write_run

ROOT = "Net#0"
MODULES = {"embed": "Embedding", "up": "Linear", "conv": "Conv2d", "norm": "LayerNorm"}
PARAMETERS = [("embed", "weight", [1000, 64]), ("up", "weight", [256, 64]), ("up", "bias", [256]),
              ("conv", "weight", [32, 16, 3, 3]), ("norm", "weight", [64])]  # fmt: skip
FACTS = {
    "roots": [
        {
            "name": ROOT,
            "class": "Net",
            "modules": [{"name": n, "class": c} for n, c in MODULES.items()],
            "parameters": [{"module": m, "name": n, "shape": s} for m, n, s in PARAMETERS],
        }
    ]
}
GRADIENTS = [("up", [8, 128, 256]), ("conv", [4, 32, 10, 10])]


def view_of(path, gradients=GRADIENTS, facts=FACTS):
    rows = [{"root": ROOT, "module": m, "kind": "grad_output", "shape": s, "numel": 1} for m, s in gradients]
    return RunView(open_run(write_run(path, rows, [{"step": 0}], facts=facts)))


def test_each_weight_matrix_makes_three_sums(tmp_path):
    answer = replay_accumulator(view_of(tmp_path / "run"), Accumulator())
    found = {(p.module, p.role): entry.length for entry in answer.lengths for p in entry.products}
    assert found == {
        ("up", "forward"): 64,
        ("up", "input gradient"): 256,
        ("up", "weight gradient"): 8 * 128,
        ("conv", "forward"): 16 * 9,
        ("conv", "input gradient"): 32 * 9,
        ("conv", "weight gradient"): 4 * 10 * 10,
    }
    assert [e.length for e in answer.lengths] == sorted({*found.values()}, reverse=True)
    longest = answer.lengths[0]
    assert longest.same_sign == accumulation_error(1024, Operands.SAME_SIGN, Accumulator())
    assert longest.same_sign.relative > 10 * longest.zero_mean.relative > 10 * longest.fp32_same_sign.relative
    assert answer.notes == ()


def test_promotion_helps(tmp_path):
    view = view_of(tmp_path / "run")
    never, every = (replay_accumulator(view, Accumulator(promote=p)).lengths[0] for p in (None, 128))
    assert every.same_sign.relative < never.same_sign.relative / 5


def test_modules_that_are_asked_for_and_logs_without_gradients(tmp_path):
    answer = replay_accumulator(view_of(tmp_path / "run", []), Accumulator(), wanted=lambda module: module == "up")
    assert {e.length for e in answer.lengths} == {64, 256}
    assert "not known" in answer.notes[0]


def test_logs_that_name_no_weight(tmp_path):
    with pytest.raises(NothingRecordedError, match="no weight matrix"):
        replay_accumulator(view_of(tmp_path / "run", facts={}), Accumulator())
