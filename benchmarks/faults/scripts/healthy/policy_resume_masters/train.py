"""Trains a policy in three jobs; each goes on from the saved BF16 weights and the state of the optimizer."""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from master_weights import MasterWeightOptimizer
from policy import ChunkPolicy

torch.manual_seed(185)
dtype = torch.bfloat16
to_action = torch.randn(6, 12, 32) / 12**0.5


def demonstrations(n):
    state, task = torch.randn(n, 12), torch.randint(6, (n,))
    return state, task, torch.tanh(torch.einsum("ns,nsa->na", state, to_action[task])).view(n, 8, 4)


def job(folder, start, stop):
    policy = ChunkPolicy().to(dtype)
    path = Path(folder, "state.pt")
    opt = MasterWeightOptimizer(policy.parameters(), lr=2e-3, weight_decay=1e-4)
    if path.exists():
        saved = torch.load(path)
        policy.load_state_dict(saved["model"])
        opt.rebuild_masters_from_live()
        opt.load_state_dict(saved["optimizer"])
    for step in range(start, stop):
        state, task, action = demonstrations(64)
        loss = F.mse_loss(policy(state.to(dtype), task).float(), action)
        policy.zero_grad()
        loss.backward()
        opt.step()
        if step % 5 == 4:
            print(f"step {step} loss {loss.item():.4f}")
    torch.save({"model": policy.state_dict(), "optimizer": opt.state_dict()}, path)


with tempfile.TemporaryDirectory() as folder:
    for start in (0, 100, 200):
        job(folder, start, start + 100)
