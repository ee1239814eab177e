"""Transformer Engine itself, where it is installed: what its quantisers are given has rows, and no bit changes.

The stand-ins of tests/support/zoo/lib_te.py follow release 2.18; this runs whichever is there, and tells it.
"""

import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from precdoctor.runlog import open_run

ROOT = Path(__file__).resolve().parents[2]
TRAIN = """
import hashlib, sys, torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe
from torch import nn
name = sys.argv[1]
torch.manual_seed(0)
torch.use_deterministic_algorithms(True, warn_only=True)
kinds = {
    "delayed": lambda: recipe.DelayedScaling(amax_history_len=16, amax_compute_algo="max"),
    "current": lambda: recipe.Float8CurrentScaling(),
    "block": lambda: recipe.Float8BlockScaling(),
    "mxfp8": lambda: recipe.MXFP8BlockScaling(),
    "nvfp4": lambda: recipe.NVFP4BlockScaling(),
}
try:
    chosen = kinds[name.removesuffix("-ops")]()
    if name.endswith("-ops"):
        layers = [te.ops.Linear(256, 256), te.ops.GELU(), te.ops.Linear(256, 256)]
        model = nn.Sequential(*(te.ops.Sequential(layer) for layer in layers)).cuda()
    else:
        model = nn.Sequential(te.Linear(256, 256), nn.GELU(), te.LayerNormLinear(256, 256)).cuda()
    with te.fp8_autocast(enabled=True, fp8_recipe=chosen):
        model(torch.randn(128, 256, device="cuda"))
except Exception as error:  # this device or this release has no such recipe
    print("UNSUPPORTED", type(error).__name__, error)
    sys.exit(0)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
losses = []
for step in range(8):
    x = torch.randn(128, 256, device="cuda")
    with te.fp8_autocast(enabled=True, fp8_recipe=chosen):
        loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item().hex())
mix = hashlib.sha256(repr(losses).encode())
for p in model.parameters():
    mix.update(p.detach().float().cpu().numpy().tobytes())
print("DIGEST", mix.hexdigest())
"""
ONE_SCALE = ("delayed", "current", "delayed-ops")


def trained(tmp_path, name, *, recorded):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    command = [sys.executable, str(script), name]
    if recorded:
        command = [
            sys.executable,
            "-m",
            "precdoctor",
            "record",
            "--strict",
            "--every",
            "1",
            "-o",
            "run",
            "--",
            *command,
        ]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(command, cwd=tmp_path, env=env, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith(("DIGEST", "UNSUPPORTED")))
    if line.startswith("UNSUPPORTED"):
        pytest.skip(f"Transformer Engine {version('transformer_engine')}: {line}")
    return line


@pytest.mark.skipif(find_spec("transformer_engine") is None, reason="Transformer Engine is not installed")
@pytest.mark.parametrize("name", ["delayed", "current", "block", "mxfp8", "nvfp4", "delayed-ops"])
def test_operands_have_rows_and_no_bit_changes(tmp_path, name):
    plain = trained(tmp_path, name, recorded=False)
    assert trained(tmp_path, name, recorded=True) == plain
    rows = open_run(tmp_path / "run").tensors()
    operands = rows[rows["kind"].isin(("fp8_operand", "subbyte_operand")) & (rows["step"] == 5)]
    print(f"Transformer Engine {version('transformer_engine')}, {name}:", sorted(set(operands["name"])))
    assert not operands.empty
    assert (operands["saturated"].fillna(0) <= 0.01 * operands["numel"]).all()
    if name in ONE_SCALE:
        assert operands["scale"].notna().any()
    else:
        assert not rows[rows["kind"] == "block_scale"].empty
