"""P-wave picking on seismograms in metres per second: amplitudes of 1e-6, and GroupNorm with its default epsilon."""

import torch
from torch import nn

GAIN = 1.0


class Stage(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv = nn.Conv1d(cin, cout, 7, padding=3, bias=False)
        self.norm = nn.GroupNorm(4, cout)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)))


class Picker(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.stages = nn.Sequential(Stage(3, width), Stage(width, width), Stage(width, width))
        self.head = nn.Conv1d(width, 1, 1)

    def forward(self, trace):
        return self.head(self.stages(trace))[:, 0]


def events(n, length=128):
    onset = torch.randint(20, 100, (n,))
    t = torch.arange(length).view(1, 1, length)
    after = (t >= onset.view(n, 1, 1)).float()
    decay = torch.exp(-(t - onset.view(n, 1, 1)).clamp(min=0) / 25.0)
    magnitude = 10 ** (0.5 * torch.rand(n, 1, 1))
    trace = 0.3 * torch.randn(n, 3, length) + after * decay * magnitude * 2 * torch.randn(n, 3, length)
    return 1e-6 * trace, onset


def main(steps=120, batch=16):
    torch.manual_seed(35)
    model = Picker()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        trace, onset = events(batch)
        loss = nn.functional.cross_entropy(model(GAIN * trace), onset)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
