"""The kernels on a CUDA device count what the CPU reference counts."""

import math

import pytest
import torch

from precdoctor.recording import kernels
from precdoctor.recording.kernels import layout as at
from precdoctor.recording.kernels import reference

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
RARE = [math.nan, math.inf, -math.inf, 0.0, 1e-40, 2.0**-149, 3.4e38, 448.0]


def rows(device):
    ints, floats = kernels.Bank(torch.device(device)).row(0)
    return ints.clone(), floats.clone(), torch.zeros((), dtype=torch.int64, device=device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7,), (3, 33), (2, 5, 130), (300, 257), (70001,)])
def test_the_device_counts_what_the_reference_counts(dtype, shape):
    x = torch.randn(shape, dtype=torch.float64)
    x.view(-1)[: min(len(RARE), x.numel())] = torch.tensor(RARE[: x.numel()], dtype=torch.float64)
    x = x.to(dtype)
    here, there = rows("cpu"), rows("cuda")
    reference.measure(x, *here, at.BLOCK_SIZES)
    reference.measure(x.cuda(), *there, at.BLOCK_SIZES)
    assert torch.equal(here[0], there[0].cpu())
    assert torch.equal(here[1][:2], there[1][:2].cpu())
    assert torch.allclose(here[1], there[1].cpu(), rtol=1e-9, equal_nan=True)


def test_measuring_and_taking_a_snapshot_never_wait_for_the_device():
    x = torch.randn(1 << 20, device="cuda", dtype=torch.bfloat16)
    bank = kernels.bank(x.device)
    kernels.stat(x, 3)
    bank.snapshot(4).wait()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            kernels.stat(x, 3)
            snapshot = bank.snapshot(4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    snapshot.wait()
    assert snapshot.row(3)[0][at.NUMEL] == x.numel()
    kernels.forget_all()
