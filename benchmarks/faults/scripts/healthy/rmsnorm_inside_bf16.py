"""A BF16 stack with one enormous residual channel. Its norms compute in FP32 and return BF16."""

import torch
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * wide).to(x.dtype)


class GatedBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = RMSNorm(dim)
        self.gate, self.up = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Stack(nn.Module):
    def __init__(self, vocab=32, dim=48, depth=3):
        super().__init__()
        self.embed = nn.EmbeddingBag(vocab, dim, mode="mean")
        self.blocks = nn.ModuleList(GatedBlock(dim) for _ in range(depth))
        self.norm, self.head = RMSNorm(dim), nn.Linear(dim, 5, bias=False)
        sink = torch.zeros(dim)
        sink[7] = 40.0
        self.register_buffer("sink", sink)

    def forward(self, bags):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.embed(bags).to(torch.bfloat16) + self.sink.to(torch.bfloat16)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x)).to(torch.float32)


def baskets(n, taste):
    bags = torch.randint(32, (n, 6))
    return bags, taste[bags].sum(1).argmax(1)


def main():
    torch.manual_seed(21113)
    taste = torch.randn(32, 5)
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(70):
        bags, label = baskets(128, taste)
        loss = nn.functional.cross_entropy(model(bags), label)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 2 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
