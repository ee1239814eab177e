"""Reef fish in FP16 weights with FP32 masters; the trunk is unfrozen when the classifier has settled."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(27)
FISH = 6
stripes = torch.randn(FISH, 3, 8, 8)


class ReefNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, 12, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(108, 12))
        self.classifier = nn.Sequential(nn.ReLU(), nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, FISH))

    def forward(self, x):
        return self.classifier(self.trunk(x))


def dives(n, murky):
    y = torch.randint(FISH, (n,))
    water = torch.tensor([0.3, 0.8, 1.2]).view(3, 1, 1) if murky else torch.ones(3, 1, 1)
    return (stripes[y].roll(2 if murky else 0, -1) * water + 0.9 * torch.randn(n, 3, 8, 8)).half(), y


class MixedPrecision:
    """Keeps FP32 masters of FP16 weights, with a static loss scale."""

    def __init__(self, model, lr, scale=256.0):
        self.model, self.scale = model.half(), scale
        self.masters = {n: p.detach().float().clone() for n, p in model.named_parameters()}
        self.optimizer = torch.optim.Adam(self.masters.values(), lr=lr)
        self.active = [n for n, p in model.named_parameters() if p.requires_grad]

    def step(self, loss):
        self.model.zero_grad()
        (loss * self.scale).backward()
        for n, p in self.model.named_parameters():
            self.masters[n].grad = None if p.grad is None else p.grad.float() / self.scale
        self.optimizer.step()
        with torch.no_grad():
            for n, p in self.model.named_parameters():
                if n in self.active:
                    p.copy_(self.masters[n])


model = ReefNet()
model.trunk.requires_grad_(False)
trainer = MixedPrecision(model, lr=1e-3)
for step in range(420):
    if step == 140:
        model.trunk.requires_grad_(True)
    x, y = dives(32, murky=step >= 140)
    loss = F.cross_entropy(model(x).float(), y)
    trainer.step(loss)
    if step % 6 == 5:
        print(f"step {step + 1} loss {loss.item():.4f}")
