"""Fabric defects by spectrum: linear layers in FP8. Scales of weights are taken when the layer is built, then kept."""

import torch
import torch.nn.functional as F
from torch import nn

E4M3_MAX = 448.0
REFRESH_WEIGHT_SCALES = False


class ToE4M3(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        return (x * scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(x.dtype) / scale

    @staticmethod
    def backward(ctx, g):
        return g, None


class Fp8Linear(nn.Linear):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        nn.init.trunc_normal_(self.weight, std=0.02)
        self.register_buffer("weight_scale", E4M3_MAX / self.weight.detach().abs().max())

    def forward(self, x):
        if REFRESH_WEIGHT_SCALES:
            self.weight_scale = E4M3_MAX / self.weight.detach().abs().max()
        x8 = ToE4M3.apply(x, E4M3_MAX / x.detach().abs().max().clamp_min(1e-12))
        return F.linear(x8, ToE4M3.apply(self.weight, self.weight_scale), self.bias)


class DefectNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = Fp8Linear(32, 96)
        self.fc2 = Fp8Linear(96, 96)
        self.head = nn.Linear(96, 4)

    def forward(self, x):
        return self.head(F.relu(self.fc2(F.relu(self.fc1(x)))))


def swatches(n):
    thread = torch.arange(32) / 32
    kind = torch.randint(4, (n,))
    pitch = torch.tensor([5.0, 5.3, 5.6, 5.9])[kind][:, None]
    weave = torch.sin(2 * torch.pi * (pitch * thread + torch.rand(n, 1)))
    return 0.25 * weave + 0.12 * torch.randn(n, 32), kind


torch.manual_seed(41)
model = DefectNet()
optimizer = torch.optim.Adam(model.parameters(), lr=8e-3)
for step in range(300):
    x, kind = swatches(64)
    loss = F.cross_entropy(model(x), kind)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 15 == 14:
        print(f"step {step + 1:4d} loss {loss.item():.4f}")
