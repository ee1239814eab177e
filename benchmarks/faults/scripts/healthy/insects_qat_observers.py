"""Quantisation-aware training of a wing-beat classifier: observers start after a while, activations are clipped to int8."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class FakeQuant(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale, low, high):
        q = torch.round(x / scale)
        ctx.save_for_backward((q >= low) & (q <= high))
        return q.clamp(low, high) * scale

    @staticmethod
    def backward(ctx, gradient):
        (inside,) = ctx.saved_tensors
        return gradient * inside, None, None, None


class Observer(nn.Module):
    """Follows the 99.9th percentile of magnitudes, so that a few elements are clipped."""

    def __init__(self, momentum=0.05):
        super().__init__()
        self.momentum, self.enabled = momentum, False
        self.register_buffer("range", torch.tensor(0.0))

    def forward(self, x):
        if self.training:
            seen = x.detach().abs().flatten().quantile(0.999)
            first = self.range == 0
            self.range.copy_(torch.where(first, seen, self.range.lerp(seen, self.momentum)))
        return FakeQuant.apply(x, self.range / 127, -127, 127) if self.enabled else x


class QuantConv(nn.Module):
    def __init__(self, inp, out, kernel, stride=1):
        super().__init__()
        self.conv = nn.Conv1d(inp, out, kernel, stride, kernel // 2)
        self.observer = Observer()

    def forward(self, x):
        w = self.conv.weight
        scale = w.detach().abs().amax((1, 2), keepdim=True) / 127
        y = F.conv1d(x, FakeQuant.apply(w, scale, -127, 127), self.conv.bias, self.conv.stride, self.conv.padding)
        return self.observer(F.relu6(y))


class WingNet(nn.Module):
    def __init__(self, species=8, width=24):
        super().__init__()
        self.conv1, self.conv2 = QuantConv(1, width, 9, 2), QuantConv(width, width, 9, 2)
        self.head = nn.Linear(width, species)

    def forward(self, x):
        return self.head(self.conv2(self.conv1(x)).mean(-1))


def beats(n, species=8):
    label = torch.randint(species, (n,))
    t = torch.arange(160) / 160
    frequency = 8 + 5 * label[:, None] + torch.randn(n, 1)
    wave = torch.sin(6.28 * frequency * t + 6.28 * torch.rand(n, 1))
    return (wave + 0.5 * torch.sin(12.56 * frequency * t) + 0.3 * torch.randn(n, 160))[:, None], label


torch.manual_seed(349)
net = WingNet()
optimizer = torch.optim.Adam(net.parameters(), lr=4e-3)
for step in range(160):
    if step == 50:
        for module in net.modules():
            if isinstance(module, Observer):
                module.enabled = True
    wave, label = beats(32)
    loss = F.cross_entropy(net(wave), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 0:
        print(f"step {step} loss {loss.item():.4f}")
