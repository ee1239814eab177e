"""BF16 weights with a Kahan compensation: what an update loses is kept in a second BF16 tensor and added next time."""

import torch
import torch.nn.functional as F
from torch import nn


class KahanAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.98), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
                    state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
                    state["lost"] = torch.zeros_like(p)
                state["step"] += 1
                g = p.grad.float()
                m, v = state["exp_avg"].lerp_(g, 1 - b1), state["exp_avg_sq"].lerp_(g * g, 1 - b2)
                rate = group["lr"] * (1 - b2 ** state["step"]) ** 0.5 / (1 - b1 ** state["step"])
                update = (-rate * m / (v.sqrt() + group["eps"])).to(p.dtype) + state["lost"]
                before = p.clone()
                p.add_(update)
                state["lost"] = update - (p - before)


class Tagger(nn.Module):
    def __init__(self, vocab=50, dim=32):
        super().__init__()
        self.embed, self.conv = nn.Embedding(vocab, dim), nn.Conv1d(dim, dim, 3, padding=1)
        self.norm, self.out = nn.LayerNorm(dim), nn.Linear(dim, 5)

    def forward(self, x):
        x = self.embed(x)
        return self.out(self.norm(x + F.gelu(self.conv(x.transpose(1, 2)).transpose(1, 2))))


torch.manual_seed(0)
model = Tagger().to(torch.bfloat16)
optimizer = KahanAdam(model.parameters(), lr=5e-4)
for step in range(120):
    x = torch.randint(50, (16, 20))
    y = x % 5
    loss = F.cross_entropy(model(x).float().flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
