"""FP8 linear layers with one scale per tensor, amax taken anew each step. The bearing is in degrees, other inputs in rad/s."""

import torch
import torch.nn as nn
import torch.nn.functional as F

E4M3_MAX = 448.0


def to_fp8(x, dim=None):
    amax = x.detach().abs().max() if dim is None else x.detach().abs().amax(dim, keepdim=True)
    scale = E4M3_MAX / amax.clamp(min=1e-12)
    q = (x.detach() * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale
    return x + (q - x).detach()


class FP8Linear(nn.Linear):
    def forward(self, x):
        return F.linear(to_fp8(x, dim=None), to_fp8(self.weight), self.bias)


class ShipNet(nn.Module):
    def __init__(self, features=16, hidden=64, classes=4):
        super().__init__()
        self.fc1 = FP8Linear(features, hidden)
        self.fc2 = FP8Linear(hidden, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x):
        return self.head(F.relu(self.fc2(F.relu(self.fc1(x)))))


def sightings(n):
    x = 1e-3 * torch.randn(n, 16)
    y = (x[:, 1] > 0).long() + 2 * (x[:, 2] + x[:, 3] > 0).long()
    x[:, 0] = 360 * torch.rand(n)
    return x, y


torch.manual_seed(1859)
model = ShipNet()
with torch.no_grad():  # bring the units to the same size
    model.fc1.weight[:, 0] /= 360
    model.fc1.weight[:, 1:] *= 1000
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(200):
    x, y = sightings(128)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
