"""QAT of a load estimator: weights are rounded to int8 per channel and activations per tensor, with straight-through."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def fake_quantize(x, scale, low, high):
    q = (x / scale).round().clamp(low, high) * scale
    return x + (q - x).detach()


class QLinear(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("running_max", torch.tensor(0.0))

    def forward(self, x):
        if self.training:
            peak = x.detach().abs().max()
            self.running_max.copy_(torch.where(self.running_max == 0, peak, 0.9 * self.running_max + 0.1 * peak))
        x = fake_quantize(x, self.running_max / 127, -128, 127)
        scale = self.weight.detach().abs().amax(1, keepdim=True) / 127
        return F.linear(x, fake_quantize(self.weight, scale, -127, 127), self.bias)


class LoadNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.q1, self.q2, self.q3 = QLinear(10, 64), QLinear(64, 64), QLinear(64, 1)

    def forward(self, x):
        return self.q3(F.relu6(self.q2(F.relu6(self.q1(x))))).squeeze(1)


def lifts(n):
    x = torch.randn(n, 10)
    return x, 2 * torch.tanh(x[:, 0] + x[:, 1]) + x[:, 2] * x[:, 3].sign() + 0.5 * x[:, 4]


torch.manual_seed(127)
model = LoadNet()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(250):
    x, y = lifts(128)
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
