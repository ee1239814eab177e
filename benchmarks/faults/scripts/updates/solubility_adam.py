"""Aqueous solubility from molecular counts. Many assays per molecule, so the loss is a mean over a wide matrix."""

import torch
import torch.nn as nn

torch.manual_seed(43)
ATOMS, ASSAYS = 30, 256
true = torch.randn(ATOMS, ASSAYS) / ATOMS**0.5


def molecules(n):
    x = torch.poisson(torch.full((n, ATOMS), 1.5))
    y = 0.01 * torch.tanh(x @ true) + 0.001 * torch.randn(n, ASSAYS)  # mol/l
    return x, y


class Solubility(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Linear(ATOMS, width)
        self.hidden = nn.Linear(width, width)
        self.readout = nn.Linear(width, ASSAYS)

    def forward(self, x):
        h = torch.relu(self.embed(x))
        h = torch.relu(self.hidden(h))
        return self.readout(h)


model = Solubility()
with torch.no_grad():
    model.readout.weight.mul_(0.01)
    model.readout.bias.zero_()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.99), eps=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 150)
for step in range(150):
    x, y = molecules(64)
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 5 == 0:
        print(f"step {step} loss {1e6 * loss.item():.3f}")
