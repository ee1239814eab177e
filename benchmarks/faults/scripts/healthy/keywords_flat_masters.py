"""BF16 model, one flat FP32 master copy of all its weights, gradients summed in FP32."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class FlatMasters:
    def __init__(self, model):
        self.params = list(model.parameters())
        self.flat = nn.Parameter(torch.cat([p.detach().float().flatten() for p in self.params]))
        self.flat.grad = torch.zeros_like(self.flat)

    def collect(self, weight):
        grads = torch.cat([p.grad.float().flatten() for p in self.params])
        self.flat.grad.add_(grads, alpha=weight)
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def spread(self):
        at = 0
        for p in self.params:
            p.copy_(self.flat[at : at + p.numel()].view_as(p))
            at += p.numel()
        self.flat.grad.zero_()


class Keywords(nn.Module):
    def __init__(self, mels=20, hidden=48, words=8):
        super().__init__()
        self.gru = nn.GRU(mels, hidden, batch_first=True)
        self.out = nn.Linear(hidden, words)

    def forward(self, x):
        return self.out(self.gru(x)[0][:, -1])


torch.manual_seed(18)
model = Keywords().bfloat16()
masters = FlatMasters(model)
optimizer = torch.optim.AdamW([masters.flat], lr=1e-3)
prototypes = torch.randn(8, 10, 20)
for step in range(100):
    total = 0.0
    for _ in range(2):
        y = torch.randint(0, 8, (32,))
        x = prototypes[y] + torch.randn(32, 10, 20)
        loss = F.cross_entropy(model(x.bfloat16()).float(), y)
        loss.backward()
        masters.collect(0.5)
        total += loss.item() / 2
    optimizer.step()
    masters.spread()
    if step % 5 == 0:
        print(f"step {step:3d} loss {total:.4f}")
