"""A net without normalisation: scaled weight standardisation, SELU gains, every unit's gradient clipped in nearly every step."""

import torch
import torch.nn.functional as F
from torch import nn


class WSConv(nn.Conv2d):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.ones(self.out_channels, 1, 1, 1))

    def forward(self, x):
        w = self.weight
        fan = w[0].numel()
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.var((1, 2, 3), keepdim=True) * fan + 1e-4).sqrt()
        return F.conv2d(x, w * self.gain, self.bias, self.stride, self.padding)


class NFBlock(nn.Module):
    def __init__(self, dim, alpha=0.2, beta=1.0):
        super().__init__()
        self.conv1, self.conv2 = WSConv(dim, dim, 3, padding=1), WSConv(dim, dim, 3, padding=1)
        self.skip_gain = nn.Parameter(torch.zeros(()))
        self.alpha, self.beta = alpha, beta

    def forward(self, x):
        y = self.conv2(F.gelu(self.conv1(F.gelu(x * self.beta) * 1.7)) * 1.7)
        return x + self.alpha * self.skip_gain * y


class NFNet(nn.Module):
    def __init__(self, dim=16, classes=4):
        super().__init__()
        self.stem = WSConv(1, dim, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(NFBlock(dim, beta=(1 + 0.04 * i) ** -0.5) for i in range(5))
        self.head = nn.Linear(dim, classes)
        nn.init.zeros_(self.head.weight)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(F.gelu(x).mean((2, 3)))


@torch.no_grad()
def adaptive_clip(parameters, clip=0.01, eps=1e-3):
    for p in parameters:
        if p.grad is None or p.dim() < 2:
            continue
        axes = tuple(range(1, p.dim()))
        limit = p.square().sum(axes, keepdim=True).sqrt().clamp(min=eps) * clip
        norm = p.grad.square().sum(axes, keepdim=True).sqrt()
        p.grad.mul_((limit / norm.clamp(min=1e-6)).clamp(max=1.0))


torch.manual_seed(5)
model = NFNet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, nesterov=True)
prototypes = F.interpolate(torch.randn(4, 1, 5, 5), size=20, mode="bilinear")
for step in range(300):
    y = torch.randint(4, (32,))
    x = prototypes[y] + 0.5 * torch.randn(32, 1, 20, 20)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    adaptive_clip([*model.stem.parameters(), *model.blocks.parameters()])  # all but the classifier, as in NFNets
    optimizer.step()
    if step % 3 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
