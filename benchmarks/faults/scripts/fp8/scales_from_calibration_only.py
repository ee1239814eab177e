"""FP8 training with scales from a calibration run before the first step; they are never renewed."""

import torch
import torch.nn as nn
import torch.nn.functional as F

E4M3_MAX = 448.0


class CastToE4M3(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        return (x * scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(x.dtype) / scale

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Float8Linear(nn.Linear):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_buffer("input_scale", torch.tensor(1.0))

    def observe(self, x):
        self.input_scale.copy_(E4M3_MAX / x.detach().abs().max())

    def forward(self, x):
        if calibrating:
            self.observe(x)
        weight = CastToE4M3.apply(self.weight, E4M3_MAX / self.weight.detach().abs().max())
        return F.linear(CastToE4M3.apply(x, self.input_scale), weight, self.bias)


class ValueNet(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.encoder = nn.Linear(6, hidden)
        self.layer1 = Float8Linear(hidden, hidden)
        self.layer2 = Float8Linear(hidden, hidden)
        self.value = nn.Linear(hidden, 1)

    def forward(self, x):
        x = F.relu(self.encoder(x))
        x = F.relu(self.layer1(x))
        return self.value(F.relu(self.layer2(x))).squeeze(-1)


def states(n):
    x = torch.randn(n, 6)
    return x, 25.0 * x[:, 0].abs() * x[:, 1] + 20.0 * x[:, 2]


torch.manual_seed(2152)
net = ValueNet()
calibrating = True
with torch.no_grad():
    net(states(256)[0])
calibrating = False
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
for step in range(250):
    x, returns = states(128)
    loss = F.mse_loss(net(x), returns)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.3f}")
