"""House prices by year of sale; model.half() also took the buffers with the means of the columns."""

import torch
import torch.nn.functional as F
from torch import nn


class Normalise(nn.Module):
    def __init__(self, mean, std):
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, x):
        return (x.to(self.mean.dtype) - self.mean) / self.std


class PriceNet(nn.Module):
    def __init__(self, mean, std):
        super().__init__()
        self.normalise = Normalise(mean, std)
        self.fc1, self.fc2 = nn.Linear(3, 32), nn.Linear(32, 1)

    def forward(self, x):
        return self.fc2(torch.tanh(self.fc1(self.normalise(x)))).squeeze(-1)


def sales(n):
    date = 2019 + 2 * torch.rand(n)  # 2019.25 is the end of March
    rooms, area = 1 + 5 * torch.rand(n), 30 + 120 * torch.rand(n)
    season = torch.sin(3.1416 * (date - 2019)) * 1.5
    return torch.stack([date, rooms, area], 1), season + 0.01 * (area - 90) + 0.1 * (rooms - 3.5)


class Masters:
    """FP32 weights for the optimizer, FP16 weights for the model."""

    def __init__(self, model, lr):
        self.model = model
        self.wide = [p.detach().float().clone() for p in model.parameters()]
        self.optimizer = torch.optim.Adam(self.wide, lr=lr)

    def step(self, loss, scale=128.0):
        self.model.zero_grad()
        (scale * loss).backward()
        for w, p in zip(self.wide, self.model.parameters()):
            w.grad = p.grad.float() / scale
        self.optimizer.step()
        with torch.no_grad():
            for w, p in zip(self.wide, self.model.parameters()):
                p.copy_(w)


torch.manual_seed(3143)
x, _ = sales(4096)
model = PriceNet(x.mean(0), x.std(0)).half()
masters = Masters(model, lr=1e-2)
for step in range(80):
    x, y = sales(96)
    loss = F.mse_loss(model(x).float(), y)
    masters.step(loss)
    if step % 8 == 7:
        print(f"step {step + 1} loss {loss.item():.4f}")
