"""Scripts of old letters, two data-parallel workers in one process, each with the letters of its own archive."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from parallel import Replicas

torch.manual_seed(40)
HANDS = 8
glyphs = torch.randn(HANDS, 1, 8, 8)


class HandNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, stride=2))
        self.head = nn.Sequential(nn.Linear(12 * 9, 32), nn.ReLU(), nn.Linear(32, HANDS))
        self.stem.requires_grad_(False)

    def forward(self, x):
        return self.head(F.relu(self.stem(x)).flatten(1))


def letters(n, archive):
    """Archive 0 holds mostly the first half of the hands, on dark paper; archive 1 the other half."""
    half = (torch.rand(n) < 0.95).long() if archive else (torch.rand(n) < 0.05).long()
    hand = torch.randint(HANDS // 2, (n,)) + HANDS // 2 * half
    sign = -1.0 if archive else 1.0
    return sign * glyphs[hand] + 0.9 * torch.randn(n, 1, 8, 8), hand


team = Replicas(HandNet(), lambda m: torch.optim.Adam(m.parameters(), lr=2e-3))
tests = [letters(128, a) for a in (0, 1)]
for step in range(360):
    if step == 120:
        team.unfreeze("stem")
    batches = [letters(16, a) for a in (0, 1)]
    team.step([F.cross_entropy(m(x), y) for m, (x, y) in zip(team.models, batches)])
    if step % 6 == 5:
        with torch.no_grad():
            test = sum(F.cross_entropy(team.models[0](x), y) for x, y in tests) / 2
        print(f"step {step + 1} test loss {test.item():.4f}")
