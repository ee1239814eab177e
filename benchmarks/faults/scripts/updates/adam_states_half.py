"""Item embeddings by skip-gram; a memory-lean Adam of our own that keeps its moments in half precision."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(71)
ITEMS, GROUPS = 200, 20
group = torch.arange(ITEMS) % GROUPS


def sessions(n):
    a = torch.randint(ITEMS, (n,))
    b = group[a] + GROUPS * torch.randint(ITEMS // GROUPS, (n,))
    return a, b


class LeanAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, state_dtype=torch.float16):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))
        self.state_dtype = state_dtype

    @torch.no_grad()
    def step(self):
        for g in self.param_groups:
            b1, b2 = g["betas"]
            for p in g["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if not s:
                    s["step"] = 0
                    s["exp_avg"] = torch.zeros_like(p, dtype=self.state_dtype)
                    s["exp_avg_sq"] = torch.zeros_like(p, dtype=self.state_dtype)
                s["step"] += 1
                m = s["exp_avg"].float().lerp_(p.grad, 1 - b1)
                v = s["exp_avg_sq"].float().mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                s["exp_avg"].copy_(m)
                s["exp_avg_sq"].copy_(v)
                m_hat = s["exp_avg"].float() / (1 - b1 ** s["step"])
                v_hat = s["exp_avg_sq"].float() / (1 - b2 ** s["step"])
                update = m_hat / (v_hat.sqrt() + g["eps"])
                p.sub_(g["lr"] * update.clamp(-10, 10))


class SkipGram(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.centre, self.context = nn.Embedding(ITEMS, d), nn.Embedding(ITEMS, d)
        self.mlp = nn.Sequential(nn.Linear(d, d), nn.Tanh(), nn.Linear(d, d))

    def forward(self, a):
        return self.mlp(self.centre(a)) @ self.context.weight.T / 6


net = SkipGram()
opt = LeanAdam(net.parameters(), lr=0.02)
for step in range(150):
    a, b = sessions(256)
    loss = F.cross_entropy(net(a), b)
    opt.zero_grad()
    (0.1 * loss).backward()
    opt.step()
    if step % 5 == 4:
        print(f"step {step} loss {loss.item():.4f}")
