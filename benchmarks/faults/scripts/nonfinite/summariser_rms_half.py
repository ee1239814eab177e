"""A small encoder in FP16. Its own RMSNorm squares in half, and the residual stream carries values of a few hundred."""

import torch
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        variance = (x * x).mean(-1, keepdim=True)
        return x * torch.rsqrt(variance + self.eps) * self.weight.to(x.dtype)


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(dim), RMSNorm(dim)
        self.attn = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.wi = nn.Linear(dim, 2 * dim)
        self.wo = nn.Linear(2 * dim, dim)

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.wo(torch.relu(self.wi(self.norm2(x))))


class Encoder(nn.Module):
    def __init__(self, dim=32, classes=6):
        super().__init__()
        self.feature_in = nn.Linear(20, dim)
        self.layers = nn.ModuleList([Layer(dim), Layer(dim)])
        self.final_norm = RMSNorm(dim)
        self.classify = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.feature_in(x)
        for layer in self.layers:
            x = layer(x)
        return self.classify(self.final_norm(x).mean(1))


def clips(n, gen):
    """Energies as the frontend gives them: tens to hundreds, and many frames far above."""
    label = torch.randint(6, (n,), generator=gen)
    shape = torch.randn(6, 20, generator=torch.Generator().manual_seed(1))
    level = 40.0 + 800.0 * (torch.rand(n, 12, 1, generator=gen) < 0.9)
    return level * (shape[label].unsqueeze(1) + 0.4 * torch.randn(n, 12, 20, generator=gen)), label


def run(steps=120):
    gen = torch.Generator().manual_seed(12)
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(steps):
        x, label = clips(24, gen)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(x)
        loss = nn.functional.cross_entropy(logits.float(), label)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")


torch.manual_seed(90)
run()
