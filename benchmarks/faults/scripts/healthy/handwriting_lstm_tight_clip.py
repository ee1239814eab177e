# pen strokes with a two-layer LSTM; sequence losses are summed, as in the paper, and clipped hard
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(208)
T = 40


def strokes(n):
    t = torch.arange(T + 1).float()
    f, a, p = 0.3 + 0.3 * torch.rand(n, 1), 0.5 + torch.rand(n, 1), 6.28 * torch.rand(n, 1)
    pen = torch.stack([a * torch.sin(f * t + p), a * torch.cos(2 * f * t + p)], -1)
    return torch.diff(pen, dim=1, prepend=pen[:, :1]) * 3 + 0.03 * torch.randn(n, T + 1, 2)


class Pen(nn.Module):
    def __init__(self, h=40):
        super().__init__()
        self.lstm = nn.LSTM(2, h, num_layers=2, batch_first=True)
        self.out = nn.Linear(h, 2)

    def forward(self, x):
        h, _ = self.lstm(x)
        return self.out(h)


net = Pen()
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
for step in range(150):
    s = strokes(24)
    loss = F.mse_loss(net(s[:, :-1]), s[:, 1:], reduction="sum")
    opt.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    opt.step()
    if step % 3 == 0:
        print(f"step {step} loss {loss.item():.2f} norm before clipping {norm:.1f}")
