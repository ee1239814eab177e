"""A Wasserstein GAN on a ring of Gaussians, FP32; nothing holds the critic: no clipping, no gradient penalty."""

import torch
from torch import nn

CLIP = float("inf")


class Generator(nn.Module):
    def __init__(self, noise=8, dim=64):
        super().__init__()
        self.fc1, self.fc2, self.out = nn.Linear(noise, dim), nn.Linear(dim, dim), nn.Linear(dim, 2)

    def forward(self, z):
        return self.out(torch.relu(self.fc2(torch.relu(self.fc1(z)))))


class Critic(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.fc1, self.fc2, self.score = nn.Linear(2, dim), nn.Linear(dim, dim), nn.Linear(dim, 1)

    def forward(self, x):
        x = nn.functional.leaky_relu(self.fc1(x), 0.2)
        return self.score(nn.functional.leaky_relu(self.fc2(x), 0.2))


def ring(n):
    angle = torch.randint(8, (n,)) * 0.785
    return torch.stack([angle.cos(), angle.sin()], -1) * 2 + 0.1 * torch.randn(n, 2)


torch.manual_seed(16)
generator, critic = Generator(), Critic()
opt_g = torch.optim.RMSprop(generator.parameters(), lr=1e-3)
opt_c = torch.optim.RMSprop(critic.parameters(), lr=3e-3)
for step in range(100):
    for _ in range(4):
        fake = generator(torch.randn(64, 8)).detach()
        loss_c = critic(fake).mean() - critic(ring(64)).mean()
        opt_c.zero_grad()
        loss_c.backward()
        opt_c.step()
        with torch.no_grad():
            for p in critic.parameters():
                p.clamp_(-CLIP, CLIP)
    loss_g = -critic(generator(torch.randn(64, 8))).mean()
    opt_g.zero_grad()
    loss_g.backward()
    opt_g.step()
    if step % 2 == 0:
        print(f"step {step}: critic loss {loss_c.item():.4f}")
