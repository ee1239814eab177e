"""Maps glacier fronts from radar backscatter (decibels about a mean) with a patch MLP whose inputs are cast to FP8."""

import torch
import torch.nn as nn
import torch.nn.functional as F

E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max


def to_fp8(x, amax):
    scale = E4M3_MAX / amax.clamp(min=1e-12)
    y = (x * scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return y.to(x.dtype) / scale


class Fp8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        xq, wq = to_fp8(x, x.amax()), to_fp8(weight, weight.abs().amax())
        ctx.save_for_backward(xq, wq)
        return xq @ wq.t()

    @staticmethod
    def backward(ctx, grad):
        xq, wq = ctx.saved_tensors
        return grad @ wq, grad.flatten(0, -2).t() @ xq.flatten(0, -2)


class Fp8Linear(nn.Linear):
    def forward(self, x):
        return Fp8Matmul.apply(x, self.weight) + self.bias


class FrontNet(nn.Module):
    def __init__(self, patch=36, hidden=96):
        super().__init__()
        self.embed = Fp8Linear(patch, hidden)
        self.hidden1, self.hidden2 = Fp8Linear(hidden, hidden), Fp8Linear(hidden, hidden)
        self.mask = nn.Linear(hidden, patch)

    def forward(self, x):
        x = torch.relu(self.embed(x))
        x = x + torch.relu(self.hidden1(x))
        return self.mask(x + torch.relu(self.hidden2(x)))


def scenes(n, size=6):
    """Ice is bright and nearly even, water dark with a long tail downwards."""
    angle = 6.28 * torch.rand(n, 1, 1)
    y, x = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    ice = (x * angle.cos() + y * angle.sin() + 0.4 * torch.randn(n, 1, 1) > 0).float()
    depth = 2.0 + 9.0 * torch.rand(n, 1, 1)
    backscatter = torch.where(
        ice > 0, 0.5 + 0.3 * torch.randn(ice.shape), -depth + 0.8 * depth * torch.randn(ice.shape)
    )
    backscatter = backscatter.clamp(max=1.2)
    return backscatter.flatten(1), ice.flatten(1), depth.flatten(1)


class FrontDepth(FrontNet):
    def __init__(self):
        super().__init__()
        self.depth = nn.Linear(36, 1)

    def forward(self, x):
        mask = super().forward(x)
        return mask, self.depth(mask)


torch.manual_seed(157)
net = FrontDepth()
optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
for step in range(260):
    image, ice, depth = scenes(64)
    mask, estimate = net(image)
    loss = F.binary_cross_entropy_with_logits(mask, ice) + 0.05 * F.smooth_l1_loss(estimate, depth)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
