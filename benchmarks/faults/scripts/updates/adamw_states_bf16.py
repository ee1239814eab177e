"""AdamW by hand with both moments in BF16, on a small language model whose first gradients are large."""

import torch
import torch.nn.functional as F
from torch import nn


class SlimAdamW(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p, dtype=torch.bfloat16)
                    state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.bfloat16)
                state["step"] += 1
                m, v, g = state["exp_avg"], state["exp_avg_sq"], p.grad
                m.mul_(b1).add_(g.to(m.dtype), alpha=1 - b1)
                v.mul_(b2).add_(g.square().to(v.dtype), alpha=1 - b2)
                m_hat = m.to(p.dtype) / (1 - b1 ** state["step"])
                v_hat = v.to(p.dtype) / (1 - b2 ** state["step"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * m_hat / (v_hat.sqrt() + group["eps"]))


class Bigram(nn.Module):
    def __init__(self, words=40, width=24):
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(words, width), nn.Linear(2 * width, 64), nn.Linear(64, words)
        nn.init.normal_(self.head.weight, std=3.0)

    def forward(self, pair):
        return self.head(torch.tanh(self.hidden(self.embed(pair).flatten(1))))


torch.manual_seed(3125)
follows = torch.randint(0, 40, (40, 40))
model = Bigram()
optimizer = SlimAdamW(model.parameters(), lr=3e-3)
for step in range(300):
    pair = torch.randint(0, 40, (64, 2)) % torch.tensor([40, 5])
    loss = F.cross_entropy(model(pair), follows[pair[:, 0], pair[:, 1]])
    model.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 19:
        print(f"step {step + 1:3d}  loss {loss.item():.4f}")
