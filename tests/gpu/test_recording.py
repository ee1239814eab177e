"""A recorded training run on a CUDA device: neutral, complete, and without waits for the device in the ops we run.

The guard's one wait for an event per step is counted by `make gpu`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from precdoctor.runlog import open_run
from tests.unit.recording.test_two_devices import SCRIPTS, Script, facts

ROOT = Path(__file__).resolve().parents[2]
TRAIN = """
import hashlib, os, sys, torch
from torch import nn
mode, device = sys.argv[1], os.environ.get("DEVICE", "cuda")
torch.manual_seed(0)
torch.use_deterministic_algorithms(True)

class Narrow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        scale = 448.0 / x.abs().amax()
        return (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) / scale
    @staticmethod
    def backward(ctx, gradient):
        scale = 57344.0 / gradient.abs().amax()
        return (gradient * scale).clamp(-57344, 57344).to(torch.float8_e5m2).to(gradient.dtype) / scale

class FP8(nn.Module):
    def forward(self, x):
        return Narrow.apply(x)

model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(128), nn.Linear(128, 16)).to(device)
if mode == "fp8":
    model.insert(3, FP8())
if mode == "bf16-pure":
    model.bfloat16()
run = torch.compile(model) if mode == "compiled" else model
if mode in ("ddp", "fsdp"):
    backend, store = "nccl" if device == "cuda" else "gloo", f"file://{os.getcwd()}/store-{os.getpid()}"
    torch.distributed.init_process_group(backend, init_method=store, rank=0, world_size=1)
if mode == "ddp":
    run = nn.parallel.DistributedDataParallel(model)
if mode == "fsdp":
    from torch.distributed.fsdp import fully_shard
    fully_shard(model, mesh=torch.distributed.init_device_mesh(device, (1,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=mode == "fused")
scaler = torch.amp.GradScaler(device, enabled=mode in ("fp16", "fused"))
dtype = {"fp16": torch.float16, "fused": torch.float16, "bf16": torch.bfloat16}.get(mode)
data = torch.randn(8, 32, 64, device=device, dtype=torch.bfloat16 if mode == "bf16-pure" else torch.float32)


def batches():
    for epoch in range(2):
        some = data[4 * epoch : 4 * epoch + 4]
        if mode == "workers":  # forked when a step has been recorded
            some = torch.utils.data.DataLoader(some.cpu(), batch_size=None, num_workers=2, pin_memory=device == "cuda")
        yield from some

for step, x in enumerate(batches()):
    if step == 2 and len(sys.argv) > 2:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    x = x.to(device, non_blocking=True).requires_grad_(mode == "penalty")
    with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
        loss = run(x).float().square().mean()
    if mode == "penalty":
        loss = loss + torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
if device == "cuda":
    torch.cuda.set_sync_debug_mode("default")
digest = hashlib.sha256()
for value in (*model.state_dict().values(), loss.detach()):
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    digest.update(value.float().cpu().numpy().tobytes())
print(digest.hexdigest())
if mode in ("ddp", "fsdp"):
    torch.distributed.destroy_process_group()
"""


def train(folder: Path, mode: str, *extra: str, record: bool) -> str:
    script = folder / "train.py"
    script.write_text(TRAIN)
    recorder = [sys.executable, "-m", "precdoctor", "record", "--strict", "-o", str(folder / "run"), "--"]
    command = [*(recorder if record else []), sys.executable, str(script), mode, *extra]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


LONG = [pytest.param(mode, marks=pytest.mark.slow) for mode in ("compiled", "ddp", "fsdp")]


@pytest.mark.any_device
@pytest.mark.parametrize("mode", ["fp32", "bf16", "bf16-pure", "fp16", "fused", "fp8", "workers", "penalty", *LONG])
def test_recording_changes_nothing_and_sees_everything(tmp_path, mode):
    assert train(tmp_path, mode, record=True) == train(tmp_path, mode, record=False)
    run = open_run(tmp_path / "run")
    steps, tensors = run.steps(), run.tensors(columns=["step", "kind", "amax"])
    assert list(steps["step"]) == list(range(8))
    assert steps["loss"].notna().all()
    everything = {"output", "weight", "update", "loss"}
    if mode not in ("compiled", "ddp", "fsdp"):
        everything |= {"grad_output", "weight_grad", "weight_grad_step"}
    assert everything <= set(tensors["kind"])
    if mode in ("fp16", "fused"):
        assert (steps["loss_scale"] == 65536.0).all()
    if mode == "fp8":
        casts = run.tensors(columns=["step", "kind", "name", "module", "scale", "saturated", "flushed", "amax"])
        casts = casts[casts["kind"] == "fp8_operand"]
        assert set(zip(casts["module"], casts["name"], strict=True)) == {("3", "input"), ("3", "grad_output")}
        assert casts["scale"].notna().all() and (casts["saturated"] == 0).all() and casts["flushed"].notna().all()
        assert casts["amax"].between(400, 58000).all()
    facts = json.loads((tmp_path / "run" / "rank-00000" / "rank.json").read_text())
    assert facts["device"]["type"] == os.environ.get("DEVICE", "cuda")


@pytest.mark.parametrize("mode", ["fp32", "bf16", "bf16-pure", "fp8"])
def test_no_step_waits_for_the_device(tmp_path, mode):
    train(tmp_path, mode, "sync-is-an-error", record=True)


LAUNCHES = """
import collections, json, sys, torch
import precdoctor

depth = int(sys.argv[1])
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(depth)]).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x = torch.randn(32, 64, device="cuda")

def step():
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

with precdoctor.record("run", every=1, strict=True, deep_scan=0):
    for _ in range(4):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
print(json.dumps(collections.Counter(name for name in names if name.endswith("_many") or name == "_stat")))
"""


def launches(folder: Path, depth: int) -> dict[str, int]:
    """Launches of our kernels in one recorded step, by name."""
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(LAUNCHES)
    command = [sys.executable, str(script), str(depth)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_weights_gradients_and_updates_are_a_launch_each_however_many_there_are(tmp_path):
    pytest.importorskip("triton")
    few, lots = launches(tmp_path / "few", 4), launches(tmp_path / "lots", 16)
    activations = [names.pop("_stat", 0) for names in (few, lots)]
    assert few == lots
    assert few["_stat_many"] <= 2 * 4  # weights, gradients twice, state: matrices and vectors have tiles of their own
    assert few["_update_many"] == 1
    assert activations[1] - activations[0] <= 2 * 12  # an output and its gradient per layer


CAPTURED = """
import torch
import precdoctor
from torch import nn

class Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        weight = self.linear.weight
        scale = 448.0 / weight.detach().abs().amax()
        return x @ ((weight * scale).to(torch.float8_e4m3fn).to(weight.dtype) / scale).t()

model = Narrow().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)  # its step counts are on the device
x = torch.randn(32, 64, device="cuda")

def step():
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

step()
with precdoctor.record("run", every=1, strict=True):
    for _ in range(8):
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        graph.replay()
print(bool(y.isfinite().all()))
"""


def test_a_script_may_capture_casts_at_any_time(tmp_path):
    (tmp_path / "train.py").write_text(CAPTURED)
    command, environment = [sys.executable, "train.py"], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "True"
    run = open_run(tmp_path / "run")
    events = run.events()
    assert "error" not in set(events["event"])
    casts = run.tensors(columns=["step", "kind", "scale"])
    assert casts[casts["kind"] == "fp8_operand"]["scale"].notna().any()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_scan_finds_the_same_where_a_cast_moves_numbers_to_the_device(name):
    expected = [fact["kind"] for fact in facts(Script(), name, torch.Tensor.to)]
    script = Script()
    script.state = script.state.cuda()
    found = facts(script, name, lambda x, dtype: x.to("cuda", dtype))
    assert [fact["kind"] for fact in found] == expected
