"""A classifier in bfloat16; the gradients of 32 micro batches are added up in FP32 buckets by hooks."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(2352)
FEATURES, CLASSES, ACCUMULATION = 32, 12, 32
centres = torch.randn(CLASSES, FEATURES)


class Residual(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x))))


class Buckets:
    def __init__(self, model):
        self.params = list(model.parameters())
        self.wide = [p.detach().float().clone().requires_grad_() for p in self.params]
        for w, p in zip(self.wide, self.params):
            w.grad = torch.zeros_like(w)
            p.register_post_accumulate_grad_hook(lambda p, w=w: self._collect(w, p))

    @staticmethod
    def _collect(w, p):
        w.grad += p.grad.float()
        p.grad = None

    @torch.no_grad()
    def publish(self):
        for w, p in zip(self.wide, self.params):
            p.copy_(w)
            w.grad.zero_()


model = nn.Sequential(nn.Linear(FEATURES, 48), Residual(48), Residual(48), nn.Linear(48, CLASSES)).bfloat16()
buckets = Buckets(model)
opt = torch.optim.AdamW(buckets.wide, lr=2e-3)
for step in range(40):
    total = 0.0
    for _ in range(ACCUMULATION):
        y = torch.randint(CLASSES, (4,))
        x = centres[y] + 1.5 * torch.randn(4, FEATURES)
        loss = F.cross_entropy(model(x.bfloat16()).float(), y) / ACCUMULATION
        loss.backward()
        total += loss.item()
    opt.step()
    buckets.publish()
    print(f"step {step} loss {total:.4f}")
