"""A set transformer whose padded rows see nothing at all; scaled_dot_product_attention knows what to do with them."""

import torch
from torch import nn
from torch.nn import functional as F


class SetBlock(nn.Module):
    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim))

    def forward(self, x, present):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        visible = present[:, None, :, None] & present[:, None, None, :]
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class SetRegressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(3, 32)
        self.blocks = nn.ModuleList(SetBlock() for _ in range(2))
        self.leave = nn.Linear(32, 1)

    def forward(self, points, present):
        x = self.enter(points)
        for block in self.blocks:
            x = block(x, present)
        pooled = x.masked_fill(~present.unsqueeze(-1), -torch.inf).amax(1)
        return self.leave(pooled).squeeze(-1)


def main():
    torch.manual_seed(0)
    model = SetRegressor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(15):
        count = torch.randint(1, 9, (16, 1))
        present = torch.arange(8) < count
        points = torch.randn(16, 8, 3) * present.unsqueeze(-1)
        loss = (model(points, present) - points.sum((1, 2)) / 5).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(step, loss.item())


main()
