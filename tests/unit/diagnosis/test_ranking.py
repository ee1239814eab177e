"""Which finding comes first: the heavier, then the earlier cause in triage order, then the surer."""

from pathlib import Path

from precdoctor.diagnosis import diagnose
from tests.support.training import NUMEL, Training, normal, tensor


def both() -> Training:
    """Some updates of BF16 weights are lost (PD501, most stick), and a teacher stands still for certain (PD509)."""
    run = Training(weight_dtype="bfloat16")
    for step, rows in run.tensors.items():
        for row in rows:
            if row["kind"] == "weight":
                row["fingerprint"] = step
            if row["kind"] == "update":
                row.update(unchanged=NUMEL // 3, zero=NUMEL // 3, rel_lo=-9, rel_hist=[NUMEL // 3, NUMEL - NUMEL // 3])
        still = {"name": "weight", "dtype": "bfloat16", "fingerprint": 7, "numel": 4096}
        rows += [tensor(step, "weight", m, len(rows), **still) for m in ("teacher.attn.proj", "average.attn.proj")]
    return run


def test_among_equals_the_surer_finding_comes_first(tmp_path: Path) -> None:
    found = {f.code: f.confidence for f in diagnose(both().write(tmp_path / "run")).findings}
    assert [c for c in found if c in ("PD501", "PD509")] == ["PD509", "PD501"]
    assert found["PD509"] > found["PD501"]


def never_learnt(rate_at_the_end: float) -> Training:
    """The head is replaced in its first steps, grows twelvefold, and the loss stays."""
    run = Training()
    for step, row in run.step_rows.items():
        row.update(loss=1.4, lr=0.5 if step < 3 else rate_at_the_end)
        for tensor_row in run.tensors[step]:
            if tensor_row["module"] == "head" and tensor_row["kind"] == ("update" if step < 3 else "weight"):
                tensor_row.update(normal(0.8 if step < 3 else 12.0))
    return run


def test_a_rate_that_stays_too_large_is_lowered_before_it_is_warmed_up(tmp_path: Path) -> None:
    [finding] = [f for f in diagnose(never_learnt(0.5).write(tmp_path / "run")).findings if f.code == "PD504"]
    lower, warm_up = finding.prescriptions
    assert lower.change == {"lr_factor": 0.02}
    assert "0.5 -> 0.01" in lower.title
    assert "warm up from a learning rate of 0.01" in warm_up.title
    for p in finding.prescriptions:
        ratio = p.predicted["update_to_weight"]
        assert ratio["to"] < 0.025 < ratio["from"]


def test_a_rate_that_decays_by_itself_is_only_warmed_up(tmp_path: Path) -> None:
    [finding] = [f for f in diagnose(never_learnt(0.1).write(tmp_path / "run")).findings if f.code == "PD504"]
    [warm_up] = finding.prescriptions
    assert "warm up" in warm_up.title
