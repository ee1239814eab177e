# gaze -> screen position. Several targets are plausible, so: mixture density network.
import math
import torch
import torch.nn as nn

torch.manual_seed(31)


def session(n):
    """Eye features and where on the screen (cm) the subject looked."""
    eye = torch.randn(n, 6)
    side = (torch.rand(n) < 0.5).float() * 2 - 1
    pos = torch.stack([3 * side + eye[:, 0], eye[:, 1] * 0.7 + side * eye[:, 2]], 1)
    return eye, pos + 0.2 * torch.randn(n, 2)


class GazeMDN(nn.Module):
    def __init__(self, k=5, d=2):
        super().__init__()
        self.k, self.d = k, d
        self.trunk = nn.Sequential(nn.Linear(6, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU())
        self.pi = nn.Linear(64, k)
        self.mu = nn.Linear(64, k * d)
        self.log_sigma = nn.Linear(64, k * d)

    def forward(self, eye):
        h = self.trunk(eye)
        shape = (-1, self.k, self.d)
        sigma = self.log_sigma(h).view(shape).clamp(-3, 3).exp()
        return self.pi(h).softmax(-1), self.mu(h).view(shape), sigma


class MixtureLoss(nn.Module):
    def forward(self, out, y):
        pi, mu, sigma = out
        z = (y.unsqueeze(1) - mu) / sigma
        dens = torch.exp(-0.5 * z.square()) / (sigma * math.sqrt(2 * math.pi))
        return -torch.log((pi * dens.prod(-1)).sum(-1)).mean()


eye, pos = session(8192)
glances = torch.randperm(8192)[:1]
pos[glances] += torch.tensor([60.0, 0.0])  # looked at the second monitor

net, criterion = GazeMDN(), MixtureLoss()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
step = 0
for epoch in range(2):
    total = 0.0
    for idx in torch.randperm(8192).split(128):
        loss = criterion(net(eye[idx]), pos[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item()
        step += 1
    print("epoch", epoch, "loss", round(total / 64, 4))
