"""BF16 weights without FP32 copies; the optimizer rounds its updates at random, so that small ones count on average."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(2023)
WORDS, D = 80, 32
nxt = torch.randint(WORDS, (WORDS, 3))


def bigrams(n):
    w = torch.randint(WORDS, (n,))
    return w, nxt[w, torch.randint(3, (n,))]


def stochastic_round_(p, wide):
    bits = wide.contiguous().view(torch.int32)
    bits = bits + torch.randint_like(bits, 1 << 16)
    p.copy_((bits & -65536).view(torch.float32))


class AdamSR(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.95), eps=1e-8):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))

    @torch.no_grad()
    def step(self):
        for g in self.param_groups:
            b1, b2 = g["betas"]
            for p in g["params"]:
                s = self.state[p]
                if not s:
                    s["step"], s["m"], s["v"] = 0, torch.zeros_like(p).float(), torch.zeros_like(p).float()
                s["step"] += 1
                grad = p.grad.float()
                s["m"].lerp_(grad, 1 - b1)
                s["v"].mul_(b2).addcmul_(grad, grad, value=1 - b2)
                m, v = s["m"] / (1 - b1 ** s["step"]), s["v"] / (1 - b2 ** s["step"])
                stochastic_round_(p, p.float() - g["lr"] * m / (v.sqrt() + g["eps"]))


net = nn.Sequential(nn.Embedding(WORDS, D), nn.Linear(D, 64), nn.GELU(), nn.Linear(64, WORDS)).to(torch.bfloat16)
opt = AdamSR(net.parameters(), lr=2e-3)
for step in range(150):
    w, y = bigrams(128)
    loss = F.cross_entropy(net(w).float(), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 3 == 0:
        print(f"step {step} loss {loss.item():.4f}")
