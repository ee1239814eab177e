"""Tags for products out of 3000 labels, FP32; gradients pass through FP16 as in a compressed all-reduce over 256 workers."""

import torch
import torch.nn.functional as F
from torch import nn

WORLD = 256


def fp16_compress(grad):
    # what torch.distributed's fp16_compress_hook does to a bucket
    return grad.to(torch.float16).div_(WORLD).to(grad.dtype).mul_(WORLD)


class ManyLabels(nn.Module):
    def __init__(self, features=40, d=48, labels=3000):
        super().__init__()
        self.inp = nn.Linear(features, d)
        self.res = nn.Linear(d, d)
        self.labels = nn.Linear(d, labels)
        nn.init.constant_(self.labels.bias, -6.0)

    def forward(self, x):
        h = F.elu(self.inp(x))
        return self.labels(h + F.elu(self.res(h)))


torch.manual_seed(401)
rule = torch.randn(40, 3000)
model = ManyLabels()
for p in model.parameters():
    p.register_hook(fp16_compress)
# the gradients are small, so is eps
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-14)
for step in range(60):
    x = torch.randn(32, 40)
    positive = (x @ rule / 40**0.5 > 2.8).float()
    loss = F.binary_cross_entropy_with_logits(model(x), positive)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step} loss {loss.item():.6f}")
