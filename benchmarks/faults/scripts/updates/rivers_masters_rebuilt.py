"""Discharge of a river from the rain upstream: a temporal CNN in BF16, with FP32 copies of the weights for the step."""

import torch
import torch.nn.functional as F
from torch import nn


class CausalBlock(nn.Module):
    def __init__(self, c, dilation):
        super().__init__()
        self.pad = 2 * dilation
        self.conv = nn.Conv1d(c, c, 3, dilation=dilation)

    def forward(self, x):
        return x + F.silu(self.conv(F.pad(x, (self.pad, 0))))


class RiverNet(nn.Module):
    def __init__(self, gauges=6, c=24):
        super().__init__()
        self.inp = nn.Conv1d(gauges, c, 1)
        self.blocks = nn.Sequential(*(CausalBlock(c, 2**i) for i in range(3)))
        self.out = nn.Conv1d(c, 1, 1)

    def forward(self, rain):
        return self.out(self.blocks(self.inp(rain)))[:, 0, -1]


class Fp32Step:
    """Adam on FP32 copies of BF16 parameters."""

    def __init__(self, params, lr):
        self.params = list(params)
        self.masters = [p.detach().float() for p in self.params]
        self.adam = torch.optim.Adam(self.masters, lr=lr)

    @torch.no_grad()
    def step(self):
        for master, p in zip(self.masters, self.params):
            master.copy_(p)  # in case a callback has touched the model
            master.grad = p.grad.float()
        self.adam.step()
        for master, p in zip(self.masters, self.params):
            p.copy_(master)
            p.grad = None


def season(n, days=20):
    rain = torch.rand(n, 6, days) ** 4 * 3
    delay = torch.exp(-torch.arange(days).flip(0) / 4.0)
    area = torch.tensor([0.5, 1.0, 0.2, 1.5, 0.8, 0.3])
    flow = (rain * delay * area[:, None]).sum((1, 2))
    return rain - 0.6, (flow - 2.9).tanh()


torch.manual_seed(15)
model = RiverNet().to(torch.bfloat16)
optimizer = Fp32Step(model.parameters(), lr=1e-4)
for step in range(400):
    rain, flow = season(32)
    loss = F.mse_loss(model(rain.bfloat16()).float(), flow)
    loss.backward()
    optimizer.step()
    if step % 20 == 19:
        print(f"step {step + 1}, loss {loss.item():.4f}")
