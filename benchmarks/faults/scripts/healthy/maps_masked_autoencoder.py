"""A masked autoencoder: three quarters of the patches are dropped, the loss is on the hidden ones, pixels are normalised."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(617)
PATCHES, PIXELS, DIM = 16, 12, 32


def block():
    return nn.TransformerEncoderLayer(DIM, 4, 64, dropout=0.0, batch_first=True, norm_first=True, activation="gelu")


class MAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch, self.encoder, self.decoder = nn.Linear(PIXELS, DIM), block(), block()
        self.position = nn.Parameter(0.02 * torch.randn(PATCHES, DIM))
        self.mask_token = nn.Parameter(torch.zeros(DIM))
        self.pixels = nn.Linear(DIM, PIXELS)

    def forward(self, x):
        b = len(x)
        order = torch.rand(b, PATCHES).argsort(1)
        kept = order[:, : PATCHES // 4, None].expand(-1, -1, DIM)
        tokens = self.encoder((self.patch(x) + self.position).gather(1, kept))
        full = self.mask_token.expand(b, PATCHES, DIM).scatter(1, kept, tokens)
        hidden = torch.ones(b, PATCHES).scatter(1, order[:, : PATCHES // 4], 0.0)
        return self.pixels(self.decoder(full + self.position)), hidden


model = MAE()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.05)
themes = torch.randn(5, PATCHES, PIXELS)
for step in range(200):
    x = themes[torch.randint(5, (32,))] + 0.2 * torch.randn(32, PATCHES, PIXELS)
    target = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-6).sqrt()
    out, hidden = model(x)
    loss = (F.mse_loss(out, target, reduction="none").mean(-1) * hidden).sum() / hidden.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        print(f"step {step + 1} loss {loss.item():.4f}")
