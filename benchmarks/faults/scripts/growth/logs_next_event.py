"""Next-event prediction on system logs with causal linear attention over long windows."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class LinearAttention(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = torch.sigmoid(q), torch.sigmoid(k) / q.shape[-1] ** 0.5
        weights = torch.tril(q @ k.transpose(-1, -2))
        y = weights @ v
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.attention = LinearAttention(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.down(F.relu(self.up(x)))


class LogModel(nn.Module):
    def __init__(self, events=24, dim=32, layers=4):
        super().__init__()
        self.events = nn.Embedding(events, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(layers))
        self.predict = nn.Linear(dim, events)

    def forward(self, ids):
        x = self.events(ids)
        for layer in self.layers:
            x = layer(x)
        return self.predict(x)


def windows(n, length=48, events=24):
    ids = [torch.randint(events, (n,))]
    for _ in range(length):
        jump = torch.rand(n) < 0.1
        ids.append(torch.where(jump, torch.randint(events, (n,)), (5 * ids[-1] + 7) % events))
    return torch.stack(ids, 1)


torch.manual_seed(173)
model = LogModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(140):
    ids = windows(8)
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 4 == 0:
        print(f"step {step} loss {loss.item():.4f}")
