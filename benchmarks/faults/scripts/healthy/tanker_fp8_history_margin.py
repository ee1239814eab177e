"""FP8 with delayed scaling: a history of 16 amax values, their maximum, a margin of one bit, E5M2 gradients with own scales."""

import torch
import torch.nn as nn
import torch.nn.functional as F

MARGIN = 2.0


class Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        return (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) / scale

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class CastGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        scale = 57344 / (MARGIN * grad.abs().max().clamp(min=1e-30))
        return (grad * scale).to(torch.float8_e5m2).to(grad.dtype) / scale


class DelayedFP8Linear(nn.Linear):
    def __init__(self, *args, history=16):
        super().__init__(*args)
        self.register_buffer("amax_history", torch.zeros(history))

    def forward(self, x):
        amax = x.detach().abs().max()
        if bool((self.amax_history == 0).all()):
            self.amax_history.fill_(amax)
        x = Cast.apply(x, 448 / (MARGIN * self.amax_history.max()))
        self.amax_history.copy_(torch.cat([amax[None], self.amax_history[:-1]]))
        w = Cast.apply(self.weight, 448 / self.weight.detach().abs().max())
        return CastGradient.apply(F.linear(x, w, self.bias))


class DraughtNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = DelayedFP8Linear(8, 64), DelayedFP8Linear(64, 64)
        self.norm, self.out = nn.LayerNorm(64), nn.Linear(64, 1)

    def forward(self, x):
        return self.out(F.gelu(self.fc2(self.norm(F.gelu(self.fc1(x)))))).squeeze(1)


def tankers(n):
    x = torch.randn(n, 8)
    return x, x[:, 0] * x[:, 1] + torch.tanh(2 * x[:, 2]) + 0.5 * x[:, 3]


torch.manual_seed(448)
model = DraughtNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(200):
    x, y = tankers(128)
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
