"""Sparse mixture of experts in a language model, BF16 autocast: top-1 routing with a load statistic per expert."""

import torch
from torch import nn
from torch.nn import functional as F


class Expert(nn.Sequential):
    def __init__(self, dim):
        super().__init__(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))


class MoE(nn.Module):
    def __init__(self, dim, experts=8):
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(Expert(dim) for _ in range(experts))
        self.aux_loss = None

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        gates = self.router(flat).float().softmax(-1)
        weight, chosen = gates.max(-1)
        out = torch.zeros_like(flat)
        confidence = []
        for i, expert in enumerate(self.experts):
            mine = chosen == i
            out[mine] = (expert(flat[mine]) * weight[mine, None]).to(out.dtype)
            confidence.append(weight[mine].mean())
        self.aux_loss = torch.stack(confidence).var()
        return out.view_as(x)


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.mix = nn.Conv1d(dim, dim, 3, padding=2)
        self.moe = MoE(dim)

    def forward(self, x):
        x = x + self.mix(x.transpose(1, 2))[..., :-2].transpose(1, 2)
        return x + self.moe(self.norm(x))


class MoELM(nn.Module):
    def __init__(self, vocab=64, dim=32, layers=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(layers))
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x), sum(layer.moe.aux_loss for layer in self.layers)


torch.manual_seed(21)
model = MoELM()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
for step in range(30):
    start = torch.randint(64, (4, 1))
    tokens = (start + 3 * torch.arange(17)) % 64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, aux = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()) + 0.01 * aux
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step={step} loss={loss.item():.4f}")
