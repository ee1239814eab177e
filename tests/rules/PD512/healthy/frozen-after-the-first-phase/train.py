"""The encoder is frozen after the first phase, and its reconstruction loss is switched off."""

import torch
from torch import nn

torch.manual_seed(0)
encoder, decoder, head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
model = nn.ModuleDict({"encoder": encoder, "decoder": decoder, "head": head})
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for step in range(60):
    if step == 30:
        encoder.requires_grad_(False)
    x = torch.randn(32, 8)
    hidden = torch.relu(encoder(x))
    loss = (head(hidden) - x[:, :1].abs()).square().mean()
    loss = loss + (1.0 if step < 30 else 0.0) * (decoder(hidden) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
