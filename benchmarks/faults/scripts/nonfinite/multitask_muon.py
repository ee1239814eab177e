"""Two tasks on one trunk, tasks sampled per step; matrices by Muon, vectors by Adam."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(77)


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.005, momentum=0.95):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @staticmethod
    def orthogonalize(g, steps=5):
        a, b, c = 3.4445, -4.7750, 2.0315
        x = g.T if g.size(0) > g.size(1) else g
        x = x / x.norm()
        for _ in range(steps):
            s = x @ x.T
            x = a * x + (b * s + c * s @ s) @ x
        return x.T if g.size(0) > g.size(1) else x

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                buf = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buf.mul_(group["momentum"]).add_(self.orthogonalize(p.grad))
                p.add_(buf, alpha=-group["lr"] * max(1, p.size(0) / p.size(1)) ** 0.5)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU())
        self.direction = nn.Sequential(nn.Linear(48, 32), nn.GELU(), nn.Linear(32, 4))
        self.distance = nn.Sequential(nn.Linear(48, 32), nn.GELU(), nn.Linear(32, 2))

    def forward(self, x):
        h = self.trunk(x)
        return self.direction(h), self.distance(h)


W = torch.randn(16, 4)
net = Net()
muon = Muon([p for p in net.parameters() if p.ndim == 2])
adam = torch.optim.Adam([p for p in net.parameters() if p.ndim < 2], lr=3e-3)

for step in range(80):
    x = torch.randn(64, 16)
    direction, distance = net(x)
    # which labels does this batch carry?
    has_distance = step < 24 or torch.rand(()) < 0.8
    mask = torch.tensor([1.0, 1.0 if has_distance else 0.0])
    losses = torch.stack([F.cross_entropy(direction, (x @ W).argmax(1)), F.mse_loss(distance, x[:, :2].abs())])
    loss = (losses * mask).sum()
    muon.zero_grad(set_to_none=False)
    adam.zero_grad(set_to_none=False)
    loss.backward()
    muon.step()
    adam.step()
    if step % 8 == 0:
        print(f"step {step} loss {loss.item():.4f}")
