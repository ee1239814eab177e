"""Graph transformer on padded graphs. Rows without any neighbour come out of the softmax as NaN and are set to zero."""

import torch
from torch import nn


class GraphAttention(nn.Module):
    def __init__(self, dim, heads=4, hops=3):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.bias = nn.Embedding(hops + 1, heads)

    def forward(self, x, hops, allowed):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5 + self.bias(hops).permute(0, 3, 1, 2)
        scores = scores.masked_fill(~allowed[:, None], float("-inf"))
        weights = torch.nan_to_num(scores.softmax(-1), nan=0.0)
        return self.out((weights @ v).transpose(1, 2).flatten(-2))


class GraphTransformer(nn.Module):
    def __init__(self, kinds=8, dim=32, depth=2):
        super().__init__()
        self.embed = nn.Embedding(kinds, dim)
        self.attention = nn.ModuleList(GraphAttention(dim) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2 * depth))
        self.ffn = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)) for _ in range(depth)
        )
        self.head = nn.Linear(dim, 1)

    def forward(self, kinds, hops, allowed, real):
        x = self.embed(kinds)
        for i, attention in enumerate(self.attention):
            x = x + attention(self.norms[2 * i](x), hops, allowed)
            x = x + self.ffn[i](self.norms[2 * i + 1](x))
        top = x.masked_fill(~real.unsqueeze(-1), float("-inf")).amax(1)
        return self.head(top).squeeze(-1)


def graphs(batch, size, generator):
    nodes = torch.randint(3, size + 1, (batch,), generator=generator)
    real = torch.arange(size)[None] < nodes[:, None]
    edge = torch.rand(batch, size, size, generator=generator) < 0.25
    edge = (edge | edge.mT) & real[:, None] & real[:, :, None]
    two = (edge.float() @ edge.float()) > 0
    hops = torch.full((batch, size, size), 3)
    hops[two] = 2
    hops[edge] = 1
    kinds = torch.randint(8, (batch, size), generator=generator)
    return kinds, hops, edge | two, real, (kinds * real).amax(1).float() / 4 - 1


torch.manual_seed(0)
generator = torch.Generator().manual_seed(0)
net = GraphTransformer()
optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
for step in range(30):
    *inputs, target = graphs(16, 12, generator)
    loss = nn.functional.mse_loss(net(*inputs), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 0:
        print(step, loss.item())
