"""Transfer: the trunk is frozen at first and thawed later at a lower rate; sharpness-aware steps of two passes each."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class SAM:
    def __init__(self, base, rho=0.05):
        self.base, self.rho = base, rho

    def params(self):
        return [p for g in self.base.param_groups for p in g["params"] if p.grad is not None]

    @torch.no_grad()
    def climb(self):
        norm = torch.stack([p.grad.norm() for p in self.params()]).norm()
        self.moves = [(p, self.rho * p.grad / (norm + 1e-12)) for p in self.params()]
        for p, move in self.moves:
            p.add_(move)
        self.base.zero_grad()

    @torch.no_grad()
    def descend(self):
        for p, move in self.moves:
            p.sub_(move)
        self.base.step()
        self.base.zero_grad()


class BeatNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv1d(1, 12, 5, padding=2), nn.GroupNorm(3, 12), nn.SiLU(), nn.AvgPool1d(2),
            nn.Conv1d(12, 24, 5, padding=2), nn.GroupNorm(4, 24), nn.SiLU(), nn.AdaptiveAvgPool1d(4), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(96, classes)

    def forward(self, x):
        return self.head(self.trunk(x))


def beats(n, shapes):
    y = torch.randint(len(shapes), (n,))
    return (shapes[y] * (0.8 + 0.4 * torch.rand(n, 1)) + 0.4 * torch.randn(n, 32)).unsqueeze(1), y


def main():
    torch.manual_seed(7038)
    shapes = torch.randn(7, 32).cumsum(1)
    shapes = (shapes - shapes.mean(1, keepdim=True)) / shapes.std(1, keepdim=True)
    model = BeatNet(7)
    model.trunk.requires_grad_(False)
    base = torch.optim.SGD(model.head.parameters(), lr=0.2, momentum=0.9)
    sam = SAM(base)
    for step in range(60):
        if step == 25:
            model.trunk.requires_grad_(True)
            base.add_param_group({"params": model.trunk.parameters(), "lr": 0.05})
            print("trunk thawed")
        x, y = beats(48, shapes)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        sam.climb()
        F.cross_entropy(model(x), y).backward()
        sam.descend()
        if step % 3 == 0:
            print(f"step {step:2d} loss {loss.item():.4f}")


main()
