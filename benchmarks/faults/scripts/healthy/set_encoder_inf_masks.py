"""Attention pooling over sets of very different sizes: scores are filled with -inf, most weights are exactly zero."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class SetEncoder(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.inp = nn.Linear(4, dim)
        self.query = nn.Parameter(0.1 * torch.randn(dim))
        self.attn = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.out = nn.Linear(dim, 1)

    def forward(self, x, lengths):
        padding = torch.arange(x.shape[1]) >= lengths[:, None]
        h = F.relu(self.inp(x))
        h = h + self.attn(h, h, h, key_padding_mask=padding, need_weights=False)[0]
        scores = (h @ self.query).masked_fill(padding, float("-inf"))
        return self.out((scores.softmax(-1).unsqueeze(-1) * h).sum(1)).squeeze(-1)


torch.manual_seed(2163)
model = SetEncoder()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(200):
    x = torch.randn(32, 20, 4)
    lengths = torch.randint(1, 6, (32,))
    lengths[0] = 20
    valid = (torch.arange(20) < lengths[:, None]).float()
    y = (x[:, :, 0] * valid).sum(1) / lengths + (x[:, 0, 1] > 0).float()
    loss = F.mse_loss(model(x, lengths), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
