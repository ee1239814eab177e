# gaze direction from eye crops: conv trunk and regression head, each with its optimizer
import torch
from torch import nn

torch.manual_seed(4)


def eyes(n, size=20):
    gaze = torch.rand(n, 2) * 2 - 1
    ax = torch.linspace(-1.5, 1.5, size)
    dx = ax.view(1, 1, -1) - gaze[:, :1, None]
    dy = ax.view(1, -1, 1) - gaze[:, 1:, None]
    pupil = torch.exp(-(dx**2 + dy**2) / 0.15)
    glint = torch.exp(-((dx - 0.2) ** 2 + (dy + 0.2) ** 2) / 0.01)
    return (glint - pupil + 0.5 * torch.randn(n, size, size)).unsqueeze(1), gaze


class Trunk(nn.Sequential):
    def __init__(self, w=16):
        super().__init__(
            nn.Conv2d(1, w, 3, 2, 1),
            nn.GroupNorm(4, w),
            nn.SiLU(),
            nn.Conv2d(w, w, 3, 2, 1),
            nn.GroupNorm(4, w),
            nn.SiLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )


class GazeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = Trunk()
        self.head = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))

    def forward(self, x):
        return self.head(self.trunk(x))


net = GazeNet()
opt_trunk = torch.optim.AdamW(net.trunk.parameters(), lr=4e-3)
opt_head = torch.optim.AdamW(net.head.parameters(), lr=2e-3)

for it in range(160):
    x, gaze = eyes(32)
    loss = nn.functional.smooth_l1_loss(net(x), gaze)
    opt_head.zero_grad()
    loss.backward()
    opt_head.step()
    opt_trunk.zero_grad()
    opt_trunk.step()
    if it % 4 == 0:
        print(it, "loss", round(loss.item(), 5))
