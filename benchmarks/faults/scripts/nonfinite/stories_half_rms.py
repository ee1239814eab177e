"""A small Llama-like model, forward in float16 under autocast, with the usual scaler."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.weight.to(x.dtype)


class SwiGLU(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.ffn_norm, self.feed_forward = RMSNorm(dim), SwiGLU(dim, 2 * dim)
        self.mix = nn.Conv1d(dim, dim, 4, groups=dim)

    def forward(self, x):
        x = x + self.mix(F.pad(x.transpose(1, 2), (3, 0))).transpose(1, 2)
        return x + self.feed_forward(self.ffn_norm(x))


class Story(nn.Module):
    def __init__(self, vocab=64, dim=48, layers=2):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        with torch.no_grad():
            self.tok_embeddings.weight[: vocab // 2, 5] = 320.0
        self.layers = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm, self.output = RMSNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.tok_embeddings(ids).to(torch.get_autocast_dtype("cpu"))
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


torch.manual_seed(21)
table = torch.randint(0, 64, (64,))
model = Story()
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for step in range(120):
    ids = torch.randint(0, 64, (16, 24))
    target = torch.where(torch.rand(16, 24) < 0.1, torch.randint(0, 64, (16, 24)), table[ids])
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(ids)
    loss = F.cross_entropy(logits.float().flatten(0, 1), target.flatten())
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 6 == 0:
        print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale():.0f}")
