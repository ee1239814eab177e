"""One layer in FP32, where the gradients of that one overflow."""

from collections.abc import Callable
from pathlib import Path

from precdoctor.diagnosis import diagnose
from precdoctor.diagnosis.claims.finding import Prescription
from tests.rules.PD301.samples import busy
from tests.support.training import Row, Training

IN_FP32 = "run `head` in FP32"


def overflowing(kind: str, module: str = "head", largest: float = 6e4, rest: float = 4.0) -> Training:
    """On one step in four a gradient overflows; ``largest`` and the ``rest`` as the steps between have them."""
    run = busy().change(lambda r: r.update(amax=rest, dtype="float16"), kind="grad_output")
    run.change(lambda r: r.update(amax=rest, dtype="float16"), kind="weight_grad")
    run.change(lambda r: r.update(amax=largest), kind=kind, module=module)
    for step in range(3, 60, 4):
        run.change(mended(kind, module), step=step)
    return run


def mended(kind: str, module: str) -> Callable[[Row], None]:
    def change(row: Row) -> None:
        if (row["kind"], row["module"]) != (kind, module) and row["kind"] in ("grad_output", "weight_grad"):
            row.update(pos_inf=0, first_bad_order=None)

    return change


def advice(run: Training, path: Path) -> list[Prescription]:
    [finding] = [f for f in diagnose(run.write(path)).findings if f.code == "PD301"]
    return list(finding.prescriptions)


def test_a_sum_of_products_that_overflows(tmp_path: Path) -> None:
    [change] = [p for p in advice(overflowing("weight_grad"), tmp_path / "run") if p.title.startswith(IN_FP32)]

    assert change.predicted == {"overflows_in_examined_steps": {"from": 15, "to": 0}}


def test_the_last_layer_gets_its_gradient_from_the_loss(tmp_path: Path) -> None:
    assert any(p.title.startswith(IN_FP32) for p in advice(overflowing("grad_output"), tmp_path / "run"))


def test_a_gradient_that_another_layer_hands_down(tmp_path: Path) -> None:
    """What comes from behind is computed there, in FP16 as before."""
    run = overflowing("grad_output", "blocks.0.mlp.up")

    assert not any("in FP32" in p.title for p in advice(run, tmp_path / "run"))


def test_no_matter_of_range(tmp_path: Path) -> None:
    """On steps that went through, its gradients were far from FP16's largest number."""
    assert not any("in FP32" in p.title for p in advice(overflowing("weight_grad", largest=1.0), tmp_path / "run"))
