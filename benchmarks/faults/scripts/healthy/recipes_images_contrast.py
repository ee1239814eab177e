"""Contrastive training at a temperature of 0.05: logits reach twenty and the loss starts above that of a guess."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class TwoTowers(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.text = nn.Sequential(nn.EmbeddingBag(150, 48), nn.ReLU(), nn.Linear(48, dim))
        self.image = nn.Sequential(nn.Linear(50, 64), nn.ReLU(), nn.Linear(64, dim))
        self.log_scale = nn.Parameter(torch.tensor(20.0).log())

    def forward(self, words, pixels):
        t = F.normalize(self.text(words), dim=-1)
        i = F.normalize(self.image(pixels), dim=-1)
        return self.log_scale.clamp(max=4.6052).exp() * t @ i.t()


class Kitchen:
    def __init__(self):
        self.words = torch.distributions.Dirichlet(torch.full((48, 150), 0.05)).sample()
        self.look = torch.randn(48, 50)

    def pairs(self, n):
        dish = torch.randperm(48)[:n]
        words = torch.multinomial(self.words[dish], 12, replacement=True)
        return words, self.look[dish] + 0.7 * torch.randn(n, 50)


def train():
    torch.manual_seed(307)
    kitchen, model = Kitchen(), TwoTowers()
    decay = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}], lr=2e-3
    )
    for step in range(220):
        words, pixels = kitchen.pairs(32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(words, pixels)
        label = torch.arange(32)
        loss = (F.cross_entropy(logits.float(), label) + F.cross_entropy(logits.float().t(), label)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")


train()
