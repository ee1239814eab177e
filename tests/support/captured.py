"""Train three steps, capture one in a CUDA graph, train two more: a script for ``tests.support.like_cuda``."""

import json
import sys

import torch

import precdoctor
from tests.support import like_cuda

like_cuda.install(batches=True)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)


def step():
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


with precdoctor.record(sys.argv[1], every=1, strict=True):
    for _ in range(3):
        step()
    pinned, like_cuda.CUDA.capturing = like_cuda.CUDA.pinned, True
    step()
    assert like_cuda.CUDA.pinned == pinned
    other = torch.nn.Linear(8, 2)
    other(torch.randn(2, 8)).sum().backward()  # its slots have no memory yet
    like_cuda.CUDA.capturing = False
    for _ in range(2):
        step()
print(json.dumps({"refusals": like_cuda.CUDA.refusals, "waits": like_cuda.CUDA.waits}))
