"""Patch classifier with cosine annealing and warm restarts: the rate jumps back up four times."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(203)


def patches(n, s=16):
    y = torch.randint(3, (n,))
    g = torch.linspace(-1, 1, s)
    r = (g.view(1, -1, 1) ** 2 + g.view(1, 1, -1) ** 2).sqrt()
    wave = torch.sin((6 + 3 * y.view(-1, 1, 1)) * r + 6 * torch.rand(n, 1, 1))
    return (wave + 0.9 * torch.randn(n, s, s)).unsqueeze(1), y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [1, 12, 24, 32]
        self.features = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(i, o, 3, 2, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU())
                for i, o in zip(widths, widths[1:])
            )
        )
        self.fc = nn.Linear(32 * 4, 3)

    def forward(self, x):
        return self.fc(self.features(x).flatten(1))


net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9, nesterov=True, weight_decay=5e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=40, eta_min=1e-5)
for step in range(200):
    x, y = patches(32)
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    schedule.step()
    if step % 4 == 0:
        print(f"step {step} lr {schedule.get_last_lr()[0]:.4f} loss {loss.item():.4f}")
