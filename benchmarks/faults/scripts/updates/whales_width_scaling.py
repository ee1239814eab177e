"""Calls of whales, a net whose learning rates follow its width (muP) so that the small model's rate can be reused."""

import torch
import torch.nn.functional as F
from torch import nn

BASE_WIDTH, WIDTH = 32, 256
BASE_LR = 8e-3


class CallNet(nn.Module):
    def __init__(self, width=WIDTH, calls=10):
        super().__init__()
        self.inp = nn.Linear(64, width)
        self.hidden1 = nn.Linear(width, width)
        self.hidden2 = nn.Linear(width, width)
        self.readout = nn.Linear(width, calls)

    def forward(self, spectrum):
        h = F.gelu(self.inp(spectrum))
        h = F.gelu(self.hidden1(h))
        h = F.gelu(self.hidden2(h))
        return self.readout(h) * (BASE_WIDTH / WIDTH)


def mup_groups(model):
    wide, rest = [], []
    for name, p in model.named_parameters():
        (wide if name.startswith("hidden") and p.dim() == 2 else rest).append(p)
    ratio = WIDTH / BASE_WIDTH
    return [{"params": rest, "lr": BASE_LR}, {"params": wide, "lr": BASE_LR * ratio}]


def calls(n, patterns):
    kind = torch.randint(len(patterns), (n,))
    sweep = torch.stack([patterns[k].roll(int(s)) for k, s in zip(kind.tolist(), torch.randint(8, (n,)))])
    return sweep + 0.7 * torch.randn(n, 64), kind


torch.manual_seed(88)
patterns = torch.randn(10, 64)
model = CallNet()
optimizer = torch.optim.Adam(mup_groups(model))
for step in range(150):
    spectrum, kind = calls(48, patterns)
    loss = F.cross_entropy(model(spectrum), kind)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        print(f"step {step + 1} loss {loss.item():.4f}")
