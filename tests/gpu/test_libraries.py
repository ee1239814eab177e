"""Scripts of real libraries on a GPU: recorded, not a bit of their training differs, and no internal error ends it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from precdoctor.runlog import open_run

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).with_name("libraries")
SKIPPED = 77
#: By script: what it needs, variables of its environment, and how it is recorded.
TRAININGS = {
    "transformers_trainer": ("transformers", {}, []),
    "transformers_generate": ("transformers", {}, ["--inference"]),
    "lightning_mixed": ("lightning", {}, []),
    "torchvision_loader": ("torchvision", {}, []),
    "timm_compiled": ("timm", {}, []),
    "timm_compiled, CUDA graphs": ("timm", {"CUDA_GRAPHS": "1"}, []),
    "peft_accelerate": ("peft", {}, []),
    "liger_llama": ("liger_kernel", {}, []),
    "geometric_graphs": ("torch_geometric", {}, []),
    "torchao_float8": ("torchao", {}, []),
    "torchao_float8, compiled": ("torchao", {"COMPILED": "1"}, []),
    "torch_sharded, DDP": ("torch", {"SHARDED": "ddp"}, []),
    "torch_sharded, FSDP2": ("torch", {"SHARDED": "fsdp2"}, []),
    "torch_sharded, FSDP": ("torch", {"SHARDED": "fsdp"}, []),
    "torch_oddities": ("torch", {}, []),
    "torch_oddities, all ops": ("torch", {}, ["--ops", "2,3"]),
}
pytestmark = [pytest.mark.slow, pytest.mark.any_device]


def train(folder: Path, name: str, variables: dict[str, str], recorder: list[str]) -> list[str]:
    """What a script prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **variables}
    command = [*recorder, sys.executable, str(SCRIPTS / f"{name}.py")]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == SKIPPED:
        pytest.skip(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize("training", TRAININGS)
def test_recording_changes_nothing(training, tmp_path):
    library, variables, options = TRAININGS[training]
    pytest.importorskip(library)
    name = training.partition(",")[0]
    plain = train(tmp_path, name, variables, [])
    recorder = [sys.executable, "-m", "precdoctor", "record", "--strict", "-o", str(tmp_path / "run"), *options, "--"]
    assert train(tmp_path, name, variables, recorder)[-1] == plain[-1]
    run = open_run(tmp_path / "run")
    assert len(run.tensors(columns=["step"]))
    events = run.events()
    assert "error" not in set(events["event"])
    assert not any("Triton failed" in data for data in events[events["event"] == "warning"]["data"])
