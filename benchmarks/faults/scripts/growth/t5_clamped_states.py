"""A T5-like encoder in FP16 autocast that clamps its hidden states below 65504, as the library's does; most of them are larger."""

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x):
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6))


class FeedForward(nn.Module):
    def __init__(self, d, gain):
        super().__init__()
        self.norm, self.wi, self.wo = RMSNorm(d), nn.Linear(d, 3 * d), nn.Linear(3 * d, d)
        nn.init.normal_(self.wi.weight, std=gain / d**0.5)
        nn.init.normal_(self.wo.weight, std=gain / (3 * d) ** 0.5)

    def forward(self, x):
        h = F.relu(self.wi(self.norm(x)))
        with torch.autocast("cpu", enabled=False):
            # wo stays in FP32, as in T5; what it gives must fit the stream again
            y = x + self.wo(h.to(self.wo.weight.dtype))
            limit = torch.finfo(x.dtype).max - 1000
            return torch.clamp(y, min=-limit, max=limit).to(x.dtype)


class Encoder(nn.Module):
    def __init__(self, words=40, d=32, classes=8):
        super().__init__()
        self.embed = nn.Embedding(words, d)
        self.layer = nn.ModuleList([FeedForward(d, 2.0), FeedForward(d, 400.0), FeedForward(d, 2.0)])
        self.final = RMSNorm(d)
        self.head = nn.Linear(d, classes)

    def forward(self, tokens):
        x = self.embed(tokens).to(
            torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.get_default_dtype()
        )
        for layer in self.layer:
            x = layer(x)
        return self.head(self.final(x))


torch.manual_seed(412)
model = Encoder()
table = torch.randint(8, (40,))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for step in range(60):
    tokens = torch.randint(40, (12, 10))
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(tokens)
    loss = F.cross_entropy(logits.float().flatten(0, 1), table[tokens].flatten())
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 2 == 0:
        print(f"step {step} loss {loss.item():.4f}")
