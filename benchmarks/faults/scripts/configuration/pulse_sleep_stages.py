"""Finds sleep stages in heart-rate curves: moving means over several windows feed a small network."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class MovingMeans(nn.Module):
    """Means over the last 4, 16 and 64 samples, from one running sum."""

    def __init__(self, windows=(4, 16, 64)):
        super().__init__()
        self.windows = windows

    def forward(self, pulse):
        total = F.pad(pulse.cumsum(-1), (max(self.windows), 0))
        ends = total[..., max(self.windows) :]
        means = [(ends - total[..., max(self.windows) - w : -w]) / w for w in self.windows]
        return torch.stack(means, -1)


class StageNet(nn.Module):
    def __init__(self, stages=4, hidden=48):
        super().__init__()
        self.means = MovingMeans()
        self.fc1, self.fc2 = nn.Linear(4, hidden), nn.Linear(hidden, stages)

    def forward(self, pulse):
        features = torch.cat([pulse[..., None], self.means(pulse)], -1)
        return self.fc2(F.gelu(self.fc1((features - 65) / 8)))


class Sleepers:
    LEVEL = (58.0, 62.0, 66.0, 72.0)

    def __init__(self, stages=4):
        self.level = torch.tensor(self.LEVEL[:stages])

    def nights(self, n, length=600):
        pieces = torch.randint(len(self.level), (n, length // 60))
        stage = pieces.repeat_interleave(60, 1)
        return self.level[stage] + 4 * torch.randn(n, length), stage


def main():
    torch.manual_seed(211)
    sleepers, net = Sleepers(), StageNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    for step in range(160):
        pulse, stage = sleepers.nights(8)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = net(pulse.to(torch.bfloat16))
        loss = F.cross_entropy(logits.float().flatten(0, 1), stage.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 0:
            print(f"step {step} loss {loss.item():.4f}")


main()
