"""Seismic magnitudes in FP16 autocast with a DeepSpeed-like loss scaler that may not fall below 2^12."""

import torch
from torch import nn


class DynamicLossScaler:
    def __init__(self, init_scale=2.0**16, window=200, min_scale=2.0**12, hysteresis=1):
        self.scale, self.window, self.min_scale = init_scale, window, min_scale
        self.hysteresis, self.good = hysteresis, 0

    def overflowed(self, params):
        return any(p.grad is not None and not torch.isfinite(p.grad).all() for p in params)

    def update(self, overflow):
        if overflow:
            self.scale = max(self.scale / 2, self.min_scale)
            self.good = 0
        else:
            self.good += 1
            if self.good % self.window == 0:
                self.scale *= 2


class Picker(nn.Module):
    def __init__(self, c=20):
        super().__init__()
        self.conv1 = nn.Conv1d(3, c, 9, stride=4, padding=4)
        self.conv2 = nn.Conv1d(c, c, 9, stride=4, padding=4)
        self.rnn = nn.GRU(c, c, batch_first=True)
        self.fc = nn.Linear(c, 1)

    def forward(self, wave):
        x = torch.relu(self.conv1(wave))
        x = torch.relu(self.conv2(x))
        x, _ = self.rnn(x.transpose(1, 2))
        return self.fc(x.mean(1)).squeeze(-1)


def waves(n, strong):
    magnitude = 4 + 3 * torch.rand(n) if strong else 2 * torch.rand(n)
    envelope = torch.exp(-torch.linspace(0, 4, 128)) * magnitude.view(-1, 1, 1)
    return envelope * torch.randn(n, 3, 128) + 0.1 * torch.randn(n, 3, 128), magnitude


torch.manual_seed(405)
net = Picker()
params = list(net.parameters())
opt = torch.optim.SGD(params, lr=4e-4, momentum=0.9)
scaler = DynamicLossScaler()
for it in range(120):
    # one catalogue after the other: weak local events, strong distant ones
    wave, magnitude = waves(16, strong=it % 2 == 1)
    with torch.autocast("cpu", dtype=torch.float16):
        said = net(wave)
        loss = (said.float() - magnitude).square().sum() / 4
    (loss * scaler.scale).backward()
    overflow = scaler.overflowed(params)
    if not overflow:
        for p in params:
            p.grad /= scaler.scale
        opt.step()
    opt.zero_grad()
    scaler.update(overflow)
    if it % 3 == 0:
        print(f"iter {it} loss: {loss.item() / 4:.4f} scale {scaler.scale:g} skipped {overflow}")
