"""Defect maps of printed boards: a small convolutional autoencoder with a bias from an older experiment."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(35)
S = 16


def boards(n):
    x = torch.zeros(n, 1, S, S)
    cols, rows = torch.randint(S, (n, 3)), torch.randint(S, (n, 3))
    for k in range(3):
        x[torch.arange(n), 0, :, cols[:, k]] = 0.6
        x[torch.arange(n), 0, rows[:, k], :] = 0.9
    return (x + 0.05 * torch.randn_like(x)).clamp(0, 1)


class ConvAE(nn.Module):
    def __init__(self, c=16, threshold=-0.75):
        super().__init__()
        self.e1, self.e2 = nn.Conv2d(1, c, 3, 2, 1), nn.Conv2d(c, 2 * c, 3, 2, 1)
        self.d1, self.d2 = nn.ConvTranspose2d(2 * c, c, 4, 2, 1), nn.ConvTranspose2d(c, 1, 4, 2, 1)
        for layer in (self.e1, self.e2, self.d1):
            nn.init.constant_(layer.bias, threshold)  # sparse codes

    def forward(self, x):
        h = F.relu(self.e2(F.relu(self.e1(x))))
        return torch.sigmoid(self.d2(F.relu(self.d1(h))))


net = ConvAE()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
for step in range(150):
    x = boards(32)
    loss = F.mse_loss(net(x), x)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 3 == 2:
        print(f"step {step} loss {loss.item():.5f}")
