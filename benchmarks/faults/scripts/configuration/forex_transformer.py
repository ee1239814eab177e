import torch
import torch.nn.functional as F
from torch import nn


class InstanceNorm(nn.Module):
    """Reversible normalisation of each window."""

    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        return (x - mean) * 1e3


class QuoteFormer(nn.Module):
    def __init__(self, window=32, patch=4, dim=32):
        super().__init__()
        self.revin = InstanceNorm()
        self.patch = patch
        self.embed = nn.Linear(patch, dim)
        self.position = nn.Parameter(torch.zeros(window // patch, dim))
        self.layer = nn.TransformerEncoderLayer(dim, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(dim, 1)

    def forward(self, x):
        x = self.revin(x).to(self.embed.weight.dtype)
        x = self.embed(x.unfold(1, self.patch, self.patch)) + self.position
        return self.head(self.layer(x).mean(1)).squeeze(1)


def quotes(n, window=32):
    """EUR/USD around 1.08; the next move is in units of a pip."""
    trend = 0.3 * torch.randn(n, 1)
    moves = trend + 0.7 * torch.randn(n, window + 1)
    pips = moves.cumsum(1)
    return 1.08 + 1e-4 * pips[:, :-1], 3 * trend.squeeze(1)


def collate(batch, dtype=torch.bfloat16):
    x, y = batch
    return x.to(dtype), y


torch.manual_seed(64)
model = QuoteFormer()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for epoch in range(6):
    for _ in range(25):
        x, y = collate(quotes(64))
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if _ % 5 == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
