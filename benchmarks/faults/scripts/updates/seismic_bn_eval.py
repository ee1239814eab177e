"""P-wave or noise: a 1-D CNN in bfloat16 throughout, judged in eval mode after every few steps."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(121)
N = 64


def traces(n):
    label = torch.randint(2, (n,))
    t = torch.arange(N)
    onset = torch.randint(10, 40, (n, 1))
    wave = torch.exp(-(t - onset).clamp(min=0) / 10) * torch.sin(0.9 * (t - onset)) * (t >= onset)
    noise = torch.randn(n, N)
    return 40 * (label[:, None] * 3 * wave + noise).unsqueeze(1) + 100, label


def conv(i, o, momentum=0.002):
    return nn.Sequential(nn.Conv1d(i, o, 7, 2, 3), nn.BatchNorm1d(o, momentum=momentum), nn.ReLU())


class Picker(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(conv(1, 12), conv(12, 24))
        self.fc = nn.Linear(24, 2)

    def forward(self, x):
        return self.fc(self.body(x).amax(-1))


dtype = torch.bfloat16
net = Picker().to(dtype)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
val_x, val_y = traces(256)
for step in range(400):
    net.train()
    x, y = traces(24)
    loss = F.cross_entropy(net(x.to(dtype)).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 19:
        net.eval()
        with torch.no_grad():
            val = F.cross_entropy(net(val_x.to(dtype)).float(), val_y)
        print(f"step {step} train {loss.item():.4f} val loss {val.item():.4f}")
