"""A dead layer is initialised again only if an activation is dead; else its gradient is followed."""

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from precdoctor.diagnosis import diagnose
from precdoctor.diagnosis.claims.finding import Finding, Location, Severity
from precdoctor.diagnosis.ranking import consequences
from precdoctor.diagnosis.registry import RELATIONS
from tests.rules.PD107.samples import overflow
from tests.rules.PD203 import samples
from tests.support.scanning import fact, scanned
from tests.support.training import Training


def found(path: Path, run: Training, code: str = "PD203") -> Finding:
    (finding,) = diagnose(run.write(path), select=[code]).findings
    return finding


@pytest.mark.parametrize(
    ("make", "key", "words"),
    [
        (lambda: samples.cut_to_zero(-4.1), "initialise", "again"),
        (samples.behind_a_functional_relu, "initialise", "again"),
        (lambda: samples.cut_to_zero(0.0), "output", "pass the output"),
        (samples.given_nothing, "requires_grad", "freeze"),
        (lambda: samples.dead("blocks.0.mlp.up"), "hook", "print the gradients inside `blocks.0.mlp.up`"),
        (samples.whole_model, "hook", "print the gradients inside `GPT#0`"),
        (samples.loss_of_zero, "check_loss", "print the terms of the loss"),
        (samples.scaled_by_zero, "factor", "multiply by a factor other than 0 at lora.py:9"),
        (samples.whole_model_scaled_by_zero, "factor", "multiply by a factor other than 0 at lora.py:9"),
        (lambda: samples.scaled_by_zero(forward=255), "hook", "print the gradients"),
    ],
)
def test_the_cure_follows_from_what_the_log_shows(
    make: Callable[[], Training], key: str, words: str, tmp_path: Path
) -> None:
    (advice,) = found(tmp_path, make()).prescriptions
    assert key in advice.change
    assert words in advice.title
    ast.parse(advice.snippet)


def test_a_product_of_zeros_is_predicted_to_pass_on_what_arrives(tmp_path: Path) -> None:
    (advice,) = found(tmp_path, samples.scaled_by_zero()).prescriptions
    assert advice.predicted["zero_share"]["from"] == 1.0
    assert advice.predicted["zero_share"]["to"] < 0.1


@pytest.mark.parametrize(("seen", "zero", "count"), [(0.0, True, 1), (2.0, True, 2), (0.0, False, 2)])
def test_an_overflow_that_makes_the_loss_zero_explains_its_gradients(seen: float, zero: bool, count: int) -> None:
    place = Location(step=3)
    cause = Finding("PD107", "swallowed", Severity.WARNING, 0.9, "t", "m", place, evidence={"seen": seen})
    effect = Finding("PD203", "dead", Severity.ERROR, 0.9, "t", "m", place, evidence={"loss_is_zero": zero})
    left = consequences.fold([effect, cause], RELATIONS)
    assert len(left) == count
    assert left[-1].severity is (Severity.ERROR if count == 1 else Severity.WARNING)


@pytest.mark.parametrize(
    ("op", "snippet"),
    [
        ("sum.default", "y = x.sum(dtype=torch.float32)"),
        ("mul.Tensor", "y = torch.rsqrt(x.float()"),
        ("exp.default", "y = exp(x.float())"),
    ],
)
def test_a_hidden_overflow_is_widened_as_its_op_takes_it(op: str, snippet: str, tmp_path: Path) -> None:
    hidden = fact("overflow", op, **{k: v for k, v in overflow()["data"].items() if k not in ("kind", "phase")})
    assert found(tmp_path, scanned(hidden), "PD107").prescriptions[0].snippet.startswith(snippet)
