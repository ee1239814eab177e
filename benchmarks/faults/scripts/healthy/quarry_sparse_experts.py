"""Stone types from acoustic tests: padded sequences, ReLU, and one expert per token. Most activations are zero."""

import torch
from torch import nn
from torch.nn import functional as F


class Experts(nn.Module):
    def __init__(self, d, count=6):
        super().__init__()
        self.gate = nn.Linear(d, count)
        self.up = nn.ModuleList(nn.Linear(d, 2 * d) for _ in range(count))
        self.down = nn.ModuleList(nn.Linear(2 * d, d) for _ in range(count))
        self.balance = torch.zeros(())

    def forward(self, x, mask):
        p = self.gate(x).softmax(-1)
        best, index = p.max(-1)
        y = torch.zeros_like(x)
        for i, (up, down) in enumerate(zip(self.up, self.down)):
            here = (index == i) & mask
            if here.any():
                y[here] = down(F.relu(up(x[here]))) * best[here, None]
        share = F.one_hot(index[mask], p.shape[-1]).to(p.dtype).mean(0)
        self.balance = len(self.up) * (share * p[mask].mean(0)).sum()
        return x + y


class Stones(nn.Module):
    def __init__(self, d=24, kinds=5):
        super().__init__()
        self.enter = nn.Linear(8, d)
        self.one, self.two = Experts(d), Experts(d)
        self.score = nn.Linear(d, 1)
        self.kind = nn.Linear(d, kinds)

    def forward(self, x, mask):
        h = F.relu(self.enter(x)) * mask[..., None]
        h = self.two(self.one(h, mask), mask)
        weight = self.score(h)[..., 0].masked_fill(~mask, float("-inf")).softmax(-1)
        return self.kind((weight[..., None] * h).sum(1))


def knocks(tone, n=32, length=20):
    y = torch.randint(len(tone), (n,))
    size = torch.randint(2, length, (n, 1))
    x = tone[y][:, None] + 1.2 * torch.randn(n, length, 8)
    mask = torch.arange(length)[None] < size
    return x * mask[..., None], mask, y


torch.manual_seed(59)
tone, net = torch.randn(5, 8), Stones()
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
for step in range(130):
    x, mask, y = knocks(tone)
    loss = F.cross_entropy(net(x, mask), y)
    opt.zero_grad()
    (loss + 0.01 * (net.one.balance + net.two.balance)).backward()
    opt.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
