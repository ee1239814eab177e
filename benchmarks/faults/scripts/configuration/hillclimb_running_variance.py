"""An observation normaliser inside of a BF16 policy: running mean and mean square, variance as their difference."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(72)
dtype = torch.bfloat16


class RunningNormalizer(nn.Module):
    def __init__(self, size, momentum=0.05):
        super().__init__()
        self.momentum = momentum
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("mean_square", torch.ones(size))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            rate = max(self.momentum, 1 / (int(self.seen) + 1))
            self.mean.lerp_(x.mean(0), rate)
            self.mean_square.lerp_(x.square().mean(0), rate)
            self.seen += 1
        variance = (self.mean_square - self.mean.square()).clamp(min=1e-2)
        return ((x - self.mean) * variance.rsqrt()).clamp(-10, 10)


class Policy(nn.Module):
    def __init__(self, obs=4, width=64):
        super().__init__()
        self.obs_rms = RunningNormalizer(obs)
        self.pi = nn.Sequential(
            nn.Linear(obs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)
        )

    def forward(self, obs):
        return self.pi(self.obs_rms(obs))


# altitude in m, speed in m/s, slope in degrees, battery in V
middle, spread = torch.tensor([60.0, 12.0, 20.0, 24.0]), torch.tensor([2.0, 0.5, 0.7, 0.4])
expert = torch.randn(4, 2)
policy = Policy().to(dtype)
masters = [p.detach().float().requires_grad_() for p in policy.parameters()]
optimizer = torch.optim.Adam(masters, lr=2e-3)
for step in range(300):
    obs = (middle + spread * torch.randn(64, 4)).to(dtype)
    action = torch.tanh(((obs.float() - middle) / spread) @ expert)
    loss = F.mse_loss(policy(obs).float(), action)
    policy.zero_grad()
    loss.backward()
    for master, p in zip(masters, policy.parameters()):
        master.grad = p.grad.to(master.dtype)
    optimizer.step()
    with torch.no_grad():
        for master, p in zip(masters, policy.parameters()):
            p.copy_(master)
    if step % 15 == 14:
        print(f"step {step + 1} loss {loss.item():.4f}")
