"""Switches of torch, read in a process of their own: they cannot be put back once the newer spelling was used."""

import json
import subprocess
import sys

import pytest

from precdoctor.recording.output.process_facts import flags

READ = "import json; from precdoctor.recording.output.process_facts import flags; print(json.dumps(flags()))"


def read_after(*lines: str) -> dict[str, object]:
    code = "\n".join(["import torch", *lines, READ])
    return json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)


def test_stock_settings():
    known = flags()
    assert known["float32_matmul_precision"] == "highest"
    assert known["matmul_allow_fp16_reduced_precision_reduction"] is True
    assert known["cudnn_allow_tf32"] is True
    assert known["deterministic_algorithms"] is False


@pytest.mark.slow
def test_what_asks_for_determinism_and_for_narrower_products():
    known = read_after(
        "torch.use_deterministic_algorithms(True, warn_only=True)",
        "import os; os.environ['CUBLAS_WORKSPACE_CONFIG'] = ':4096:8'",
        "torch.set_float32_matmul_precision('high')",  # the older spelling
    )
    assert known["deterministic_algorithms"] is True and known["deterministic_warn_only"] is True
    assert known["cublas_workspace_config"] == ":4096:8" and flags()["deterministic_warn_only"] is False
    assert known["float32_matmul_precision"] == "high"


def test_the_newer_spelling_makes_the_older_one_unreadable_and_nothing_else():
    known = read_after(
        "matmul = torch.backends.cuda.matmul",
        "if hasattr(matmul, 'fp32_precision'): matmul.fp32_precision = 'tf32'",
    )
    if "matmul_fp32_precision" not in known:
        pytest.skip("this torch has no fp32_precision")
    assert known["matmul_fp32_precision"] == "tf32"
    assert known["float32_matmul_precision"] is None and known["matmul_allow_tf32"] is None
    assert known["cudnn_benchmark"] is False
