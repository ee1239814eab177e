"""Force of a grip from the electrical activity of the forearm, in volts as the amplifier gives it."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Loudness(nn.Module):
    """Divides every recording by its root mean square."""

    def __init__(self, eps=1e-6):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        power = (x * x).mean(dim=(1, 2), keepdim=True)
        return x / (power.sqrt() + self.eps)


class GripNet(nn.Module):
    def __init__(self, electrodes=8, forces=6):
        super().__init__()
        self.level = Loudness()
        self.conv = nn.Conv1d(electrodes, 32, 5, stride=2)
        self.fc = nn.Linear(32, 32)
        self.out = nn.Linear(32, forces)

    def forward(self, x):
        x = self.level(x).float()
        x = F.relu(self.conv(x)).mean(2)
        return self.out(F.relu(self.fc(x)))


def recordings(n, patterns):
    sign = torch.randint(0, 6, (n,))
    gain = 10 ** (torch.rand(n, 1, 1) * 1.5 - 5)
    wave = patterns[sign].unsqueeze(2) * torch.randn(n, 8, 40)
    return (gain * (wave + 0.4 * torch.randn(n, 8, 40))).half(), 4 * patterns[sign, :6]


torch.manual_seed(45)
patterns = torch.rand(6, 8)
model = GripNet()
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(200):
    x, force = recordings(64, patterns)
    loss = F.mse_loss(model(x), force)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
level = float(model.level(x).double().square().mean())
