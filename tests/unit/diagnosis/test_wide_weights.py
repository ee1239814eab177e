"""What FP32 weights cost, and that weights nobody trains stay as they are."""

from pathlib import Path

import pytest

from precdoctor.diagnosis import diagnose
from precdoctor.diagnosis.claims.finding import Prescription
from precdoctor.diagnosis.claims.words import memory
from tests.rules.PD501.samples import pure_bfloat16
from tests.support.training import FACTS, FORWARD, NUMEL, Training

TRAINED = len(FORWARD)


def adapters(frozen: int = 0, name: str = "weight") -> Training:
    """BF16 weights that lose their updates, beside frozen ones of 25 million elements each."""
    [root] = FACTS["roots"]
    trained = [{**p, "name": name, "dtype": "bfloat16"} for p in root["parameters"]]
    base = {"name": "base", "shape": [5000, 5000], "dtype": "bfloat16", "requires_grad": False}
    parameters = [*trained, *({**base, "module": f"blocks.{i}.base"} for i in range(frozen))]
    run = pure_bfloat16()
    run.facts = {**FACTS, "roots": [{**root, "parameters": parameters}]}
    return run


def advice(run: Training, path: Path) -> Prescription:
    [finding] = [f for f in diagnose(run.write(path)).findings if f.code == "PD501"]
    return finding.prescriptions[0]


def test_a_model_that_is_trained_whole_is_widened_whole(tmp_path: Path) -> None:
    whole = advice(adapters(), tmp_path / "run")

    assert whole.title.startswith("keep FP32 weights, compute BF16")
    assert "model = model.float()" in whole.snippet


def test_what_is_frozen_stays_narrow_and_is_not_paid_for(tmp_path: Path) -> None:
    """Weight, gradient and two moments take 2 bytes more each, the copy that autocast makes 2."""
    whole, trained = advice(adapters(), tmp_path / "whole"), advice(adapters(frozen=3), tmp_path / "adapters")

    assert trained.title.startswith(f"keep FP32 for the {TRAINED} trained weights, not for the 3 frozen, compute BF16")
    assert "model.float()" not in trained.snippet
    assert "if parameter.requires_grad:" in trained.snippet
    assert "peft" not in trained.snippet
    assert trained.predicted["extra_bytes"] == whole.predicted["extra_bytes"] == TRAINED * NUMEL * 10
    assert trained.title.endswith("+320 KiB")


def test_adapters_of_peft_are_told_how_peft_does_it(tmp_path: Path) -> None:
    assert "get_peft_model" in advice(adapters(frozen=1, name="lora_A.default.weight"), tmp_path / "run").snippet


@pytest.mark.parametrize(
    ("count", "text"),
    [(96, "96 B"), (36_864, "36 KiB"), (1023 * 1024, "0.999 MiB"), (1_023_590, "0.976 MiB"), (3 << 20, "3 MiB"),
     (5 << 30, "5 GiB"), (3 << 40, "3 TiB")],
)  # fmt: skip
def test_bytes_are_told_in_a_unit_that_fits(count: int, text: str) -> None:
    assert memory(count) == text
