"""FP8 attention over 1300 keys: the probabilities go to E4M3 as they are, because 'they are at most one'."""

import torch
from torch import nn

F8 = torch.float8_e4m3fn


class Round8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        return (x * scale).to(F8).to(x.dtype) / scale

    @staticmethod
    def backward(ctx, g):
        return g, None


class Fp8Attention(nn.Module):
    PROB_SCALE = 1.0

    def __init__(self, dim, heads=2):
        super().__init__()
        self.h = heads
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.o = nn.Linear(dim, dim)

    def forward(self, query, memory):
        B, L, C = memory.shape
        q = self.q(query).view(B, -1, self.h, C // self.h).transpose(1, 2)
        k, v = self.kv(memory).view(B, L, 2, self.h, C // self.h).permute(2, 0, 3, 1, 4)
        q, k, v = (Round8.apply(t, 32.0) for t in (q, k, v))
        p = (q @ k.transpose(-1, -2) / (C // self.h) ** 0.5).softmax(-1)
        p = Round8.apply(p, self.PROB_SCALE)
        return self.o((p @ v).transpose(1, 2).reshape(B, -1, C))


class Reader(nn.Module):
    """Averages a quantity over a long document; the query names the quantity."""

    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Linear(6, dim)
        self.query = nn.Embedding(6, dim)
        self.attention = Fp8Attention(dim)
        self.head = nn.Sequential(nn.Linear(2 * dim, 48), nn.ReLU(), nn.Linear(48, 1))

    def forward(self, document, which):
        q = self.query(which).unsqueeze(1)
        a = self.attention(q, self.embed(document))
        return self.head(torch.cat([a, q], -1))[:, 0, 0]


def documents(n=8, length=1300):
    mean = torch.randn(n, 1, 6)
    which = torch.randint(6, (n,))
    return mean + 0.5 * torch.randn(n, length, 6), which, mean[torch.arange(n), 0, which]


torch.manual_seed(55)
model = Reader()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(150):
    document, which, answer = documents()
    loss = nn.functional.mse_loss(model(document, which), answer)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step:3d} | loss {loss.item():.4f}")
