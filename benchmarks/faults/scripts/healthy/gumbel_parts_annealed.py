"""Discrete latents by Gumbel-softmax, annealed from 2 to 0.3 (samples nearly one-hot at the end)."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(94)
K, LATENTS, PIX = 6, 3, 24
parts = torch.randn(LATENTS, K, PIX)


def scenes(n):
    idx = torch.randint(K, (n, LATENTS))
    return sum(parts[i][idx[:, i]] for i in range(LATENTS)) + 0.1 * torch.randn(n, PIX)


class GumbelVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(PIX, 64), nn.ReLU(), nn.Linear(64, LATENTS * K))
        self.dec = nn.Linear(LATENTS * K, PIX)

    def forward(self, x, tau):
        logits = self.enc(x).unflatten(1, (LATENTS, K))
        noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-6, 1 - 1e-6)))
        z = ((logits + noise) / tau).softmax(-1)
        p = logits.softmax(-1)
        kl = (p * (p.clamp(min=1e-9) * K).log()).sum((1, 2)).mean()
        return self.dec(z.flatten(1)), kl


model = GumbelVAE()
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(200):
    tau = max(0.3, 2.0 * 0.985**step)
    x = scenes(64)
    rec, kl = model(x, tau)
    loss = F.mse_loss(rec, x) + 1e-3 * kl
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 4 == 0:
        print(f"step {step} tau {tau:.2f} loss {loss.item():.4f}")
