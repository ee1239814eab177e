"""What FP32 is predicted to do for a state that stands still."""

from pathlib import Path

import pytest

from precdoctor.diagnosis import diagnose
from tests.rules.PD509.samples import average, stalled
from tests.support.scanning import scanned


@pytest.mark.parametrize(
    ("measured", "missing_in_fp32"),
    [
        ({}, 0.0),
        ({"bits_missing": 20.0}, 4.0),
        ({"dtype": "float16", "value": 0.0, "move": 2.0**-62, "bits_missing": 37.0}, 0.0),
        ({"dtype": "float16", "value": 2.0**-20, "move": 2.0**-50, "bits_missing": 25.0}, 6.0),
    ],
)
def test_fp32_takes_up_what_is_far_below_fp16s_subnormals(
    measured: dict[str, float], missing_in_fp32: float, tmp_path: Path
) -> None:
    """Elements of 2^-20 are 2^-43 apart in FP32, and half of that is 2^-44."""
    (finding,) = diagnose(scanned(stalled(**measured)).write(tmp_path), select=["PD509"]).findings
    assert finding.prescriptions[0].predicted["bits_missing"]["to"] == missing_in_fp32


@pytest.mark.parametrize(
    ("target", "created"),
    [("state", "state = torch.zeros_like(x"), ("average", "average = copy.deepcopy(model)"), ("gradient", "sums = [")],
)
def test_a_state_is_to_be_created_in_fp32_not_cast_later(target: str, created: str, tmp_path: Path) -> None:
    (finding,) = diagnose(scanned(stalled(target=target)).write(tmp_path), select=["PD509"]).findings
    (advice,) = finding.prescriptions
    assert advice.title.startswith("create it in float32")
    assert created in advice.snippet
    assert "state.to(" not in advice.snippet


@pytest.mark.parametrize(
    ("root", "label", "lines"),
    [
        ("GPT#0", "`teacher.attn.proj.weight`", "model.teacher.float()  # once, before training\n"),
        ("EMA#1", "`EMA#1.teacher.attn.proj.weight`", "average = average.float()  # `EMA#1`, once, before training\n"),
    ],
)
def test_the_average_is_named_not_the_trained_model(root: str, label: str, lines: str, tmp_path: Path) -> None:
    run = average(changes=False)
    for rows in run.tensors.values():
        for row in rows:
            if row["module"] == "teacher.attn.proj":
                row["root"] = root
    (finding,) = diagnose(run.write(tmp_path), select=["PD509"]).findings
    assert label in finding.title
    assert finding.prescriptions[0].snippet.startswith(lines)
    assert "model.blocks[0].parameters()" in finding.prescriptions[0].snippet


def test_weights_are_to_be_kept_in_fp32(tmp_path: Path) -> None:
    decay = stalled(target="weight", phase="script", value=1.0, move=1e-2) | {"op": "aten.mul_.Tensor"}
    (finding,) = diagnose(scanned(decay).write(tmp_path), select=["PD509"]).findings
    assert "model.to(torch.float32)" in finding.prescriptions[0].snippet
