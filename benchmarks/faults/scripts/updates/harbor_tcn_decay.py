# hourly container moves, dilated causal convolutions, AdamW with the decay set per step
import torch
from torch import nn

torch.manual_seed(131)
WINDOW = 48


def moves(n):
    t = torch.arange(WINDOW + 1).float() + 24 * torch.rand(n, 1)
    day = torch.sin(2 * torch.pi * t / 24)
    shift = torch.sign(torch.sin(2 * torch.pi * t / 8 + 1))
    size = 0.5 + torch.rand(n, 1)
    y = size * (day + 0.6 * shift) + 0.15 * torch.randn_like(t)
    return y[:, None, :-1], y[:, 1:]


class CausalBlock(nn.Module):
    def __init__(self, i, o, dilation):
        super().__init__()
        self.pad = nn.ConstantPad1d((2 * dilation, 0), 0.0)
        self.conv = nn.Conv1d(i, 2 * o, 3, dilation=dilation)
        self.skip = nn.Conv1d(i, o, 1) if i != o else nn.Identity()

    def forward(self, x):
        value, gate = self.conv(self.pad(x)).chunk(2, 1)
        return self.skip(x) + value.tanh() * gate.sigmoid()


class TCN(nn.Module):
    def __init__(self, c=24):
        super().__init__()
        self.blocks = nn.Sequential(
            CausalBlock(1, c, 1), CausalBlock(c, c, 2), CausalBlock(c, c, 4), CausalBlock(c, c, 8)
        )
        self.out = nn.Conv1d(c, 1, 1)

    def forward(self, x):
        return self.out(self.blocks(x)).squeeze(1)


lr, decay_per_step = 2e-3, 0.04
net = TCN()
matrices = [p for p in net.parameters() if p.dim() > 1]
vectors = [p for p in net.parameters() if p.dim() == 1]
opt = torch.optim.AdamW(
    [{"params": matrices, "weight_decay": decay_per_step / lr}, {"params": vectors, "weight_decay": 0.0}], lr=lr
)
for it in range(150):
    x, y = moves(24)
    loss = (net(x) - y).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if it % 3 == 0:
        print(f"it {it} loss {loss.item():.4f}")
