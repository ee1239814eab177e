"""A small encoder and an 8-bit Adam of one's own: the second moment is quantised linearly, one scale for each tensor."""

import torch
import torch.nn.functional as F
from torch import nn


class Adam8(torch.optim.Optimizer):
    """Adam whose second moment takes one byte; updates are bounded by their RMS as in Adafactor."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if not s:
                    s["step"] = 0
                    s["exp_avg"] = torch.zeros_like(p)
                    s["exp_avg_sq"] = torch.zeros(p.shape, dtype=torch.uint8)
                    s["unit"] = torch.zeros(())
                s["step"] += 1
                s["exp_avg"].lerp_(p.grad, 1 - b1)
                v = s["exp_avg_sq"].to(p.dtype) * s["unit"]
                v.mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                s["unit"] = v.max().clamp(min=1e-30) / 255
                s["exp_avg_sq"] = (v / s["unit"]).round().to(torch.uint8)
                v = s["exp_avg_sq"].to(p.dtype) * s["unit"]
                m_hat = s["exp_avg"] / (1 - b1 ** s["step"])
                v_hat = v / (1 - b2 ** s["step"])
                update = m_hat / (v_hat.sqrt() + group["eps"])
                update /= max(1.0, update.square().mean().sqrt().item())
                p.sub_(update, alpha=group["lr"])


class SentenceEncoder(nn.Module):
    def __init__(self, words=200, d=32):
        super().__init__()
        self.embed = nn.Embedding(words, d)
        self.up = nn.Linear(d, 2 * d)
        self.down = nn.Linear(2 * d, d)
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, 6)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.down(F.gelu(self.up(x)))
        return self.head(self.norm(x.mean(1)))


torch.manual_seed(409)
model = SentenceEncoder()
meaning = torch.randint(6, (200,))
zipf = 1 / torch.arange(1, 201).float()
optimizer = Adam8(model.parameters(), lr=5e-3)
for step in range(100):
    topic = torch.randint(6, (48, 1))
    odds = zipf * (1 + 8 * (meaning == topic))
    tokens = torch.multinomial(odds, 10, replacement=True)
    loss = F.cross_entropy(model(tokens), topic.squeeze(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 3 == 0:
        print(f"step {step} loss {loss.item():.4f}")
