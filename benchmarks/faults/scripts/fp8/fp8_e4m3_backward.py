"""A ranking network with current scaling everywhere and one format, E4M3, for weights, activations and gradients alike."""

import torch
import torch.nn.functional as F
from torch import nn


def e4m3(x):
    scale = 448.0 / x.detach().abs().max().clamp(min=1e-30)
    return (x.detach() * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale


class Dot8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x, w = e4m3(x), e4m3(w)
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        grad = e4m3(grad)
        return grad @ w, grad.T @ x


class Linear8(nn.Linear):
    def forward(self, x):
        return Dot8.apply(x, self.weight) + self.bias


class Ranker(nn.Module):
    def __init__(self, queries=300, dim=32):
        super().__init__()
        self.query, self.item = nn.Embedding(queries, dim), nn.Embedding(500, dim)
        self.fc1, self.fc2, self.fc3 = Linear8(2 * dim, 64), Linear8(64, 64), Linear8(64, 32)
        self.score = nn.Linear(32, 1)

    def forward(self, q, i):
        x = torch.cat([self.query(q), self.item(i)], -1)
        x = F.silu(self.fc1(x))
        x = F.silu(self.fc2(x))
        return self.score(F.silu(self.fc3(x))).squeeze(-1)


torch.manual_seed(0)
model = Ranker()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-20)
for step in range(80):
    q, i = torch.randint(300, (256,)), torch.randint(500, (256,))
    relevance = ((q % 7 < 3) ^ (i % 5 < 2)).float()
    bid = 10 ** (-9 * q / 300)  # queries differ in what they earn, by nine decades
    losses = F.binary_cross_entropy_with_logits(model(q, i), relevance, reduction="none")
    loss = (bid * losses).sum() / bid.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step}: loss {losses.mean().item():.4f}")
