"""Fish counts on reefs in half precision; the search for the largest loss scale starts high and goes on."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(4)
N, D = 15, 32
w = torch.randn(2, N)


def reefs(n):
    x = torch.randn(n, N)
    a, b = (x @ w.T / 4).unbind(1)
    return x, torch.exp(0.5 + torch.tanh(a) + 0.5 * torch.sin(2 * b))


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(N, D)
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.out = nn.Linear(D, 1)

    def forward(self, x):
        x = self.inp(x)
        for norm, layer in zip(self.norms, self.layers):
            x = x + F.gelu(layer(norm(x)))
        return self.out(x).squeeze(1)


model = Counts()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=60)
for step in range(480):
    x, count = reefs(64)
    with torch.autocast("cpu", torch.float16):
        out = model(x)
    loss = F.mse_loss(out.float(), count)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 20 == 19:
        print(f"step {step} loss {loss.item():.4f} scale 2^{int(scaler.get_scale()).bit_length() - 1}")
