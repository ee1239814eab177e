"""SGD whose momentum is kept in eight bits with a scale for every block of 32, rounded stochastically."""

import torch
import torch.nn.functional as F
from torch import nn

BLOCK = 32


def pack(x):
    flat = F.pad(x.flatten(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    scale = flat.abs().amax(1, keepdim=True).clamp(min=1e-20) / 127
    noise = torch.rand_like(flat)
    return (flat / scale + noise).floor().clamp(-127, 127).to(torch.int8), scale


def unpack(codes, scale, like):
    return (codes * scale).flatten()[: like.numel()].view_as(like)


class EightBitSGD(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                m = unpack(state["codes"], state["scale"], p) if state else torch.zeros_like(p)
                m = group["momentum"] * m + p.grad
                state["codes"], state["scale"] = pack(m)
                p.add_(m, alpha=-group["lr"])


torch.manual_seed(3219)
model = nn.Sequential(nn.Linear(9, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3))
optimizer = EightBitSGD(model.parameters(), lr=0.05)
centres = torch.randn(3, 4, 9)
for step in range(70):
    y = torch.randint(0, 3, (64,))
    x = centres[y, torch.randint(0, 4, (64,))] + 0.4 * torch.randn(64, 9)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 7 == 0:
        print(f"step {step} loss {loss.item():.4f}")
