"""VAE with model.half() and Adam; eps was raised to 1e-5 because the default one gave NaN in half precision."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class VAE(nn.Module):
    def __init__(self, pixels=256, hidden=96, latent=8):
        super().__init__()
        self.fc1 = nn.Linear(pixels, hidden)
        self.fc21 = nn.Linear(hidden, latent)
        self.fc22 = nn.Linear(hidden, latent)
        self.fc3 = nn.Linear(latent, hidden)
        self.fc4 = nn.Linear(hidden, pixels)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.decode(z), mu, logvar


def loss_function(recon, x, mu, logvar):
    mse = F.mse_loss(recon.float(), x.float())
    kld = -0.5 * torch.mean(1 + logvar.float() - mu.float().pow(2) - logvar.float().exp())
    return mse + 1e-4 * kld


def digits(n):
    grid = torch.linspace(-1, 1, 16)
    yy, xx = torch.meshgrid(grid, grid, indexing="ij")
    a = 3.14 * torch.rand(n, 1, 1)
    line = xx * torch.cos(a) + yy * torch.sin(a) - 0.4 * (torch.rand(n, 1, 1) - 0.5)
    return torch.exp(-20 * line**2).flatten(1)


torch.manual_seed(2103)
model = VAE().half()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-5)
LOSS_SCALE = 8.0
for step in range(250):
    data = digits(64).half()
    recon, mu, logvar = model(data)
    loss = loss_function(recon, data, mu, logvar)
    optimizer.zero_grad()
    (loss * LOSS_SCALE).backward()
    for p in model.parameters():
        p.grad.div_(LOSS_SCALE)
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.5f}")
