import torch
import torch.nn as nn
import torch.nn.functional as F

# non-saturating GAN on marble vein directions (ring), two time scales
torch.manual_seed(205)


def real(n):
    a = torch.rand(n) * 6.2832
    r = 1 + 0.05 * torch.randn(n)
    return torch.stack([r * a.cos(), r * a.sin()], 1)


G = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
D = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
og = torch.optim.Adam(G.parameters(), lr=5e-4, betas=(0.5, 0.999))
od = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.5, 0.999))
for step in range(150):
    x, fake = real(64), G(torch.randn(64, 4))
    d = F.softplus(-D(x)).mean() + F.softplus(D(fake.detach())).mean()
    od.zero_grad()
    d.backward()
    od.step()
    g = F.softplus(-D(fake)).mean()
    og.zero_grad()
    g.backward()
    og.step()
    if step % 10 == 0:
        print(f"step {step} d {d.item():.3f} loss {g.item():.3f}")
