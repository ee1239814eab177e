"""Source separation by masks. Someone wrote that half precision wants eps=1e-4; then the loss was averaged."""

import torch
from torch import nn


class Separator(nn.Module):
    def __init__(self, bins=64, width=48):
        super().__init__()
        self.norm = nn.LayerNorm(bins)
        self.gru = nn.GRU(bins, width, batch_first=True)
        self.fc = nn.Linear(width, width)
        self.mask = nn.Linear(width, 2 * bins)

    def forward(self, mix):
        h, _ = self.gru(self.norm(mix))
        mask = self.mask(torch.relu(self.fc(h))).view(*mix.shape, 2).softmax(-1)
        return mask * mix.unsqueeze(-1)


def spectra(n, frames=20, bins=64):
    pitch = torch.randint(3, 9, (n, 2, 1, 1))
    k = torch.arange(bins).view(1, 1, 1, bins)
    comb = torch.cos(torch.pi * k / pitch).pow(8) * torch.exp(-k / (10.0 * torch.tensor([1.0, 4.0]).view(1, 2, 1, 1)))
    gain = torch.rand(n, 2, frames, 1)
    sources = 0.02 * comb * gain
    return sources.sum(1), sources.permute(0, 2, 3, 1)


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-4)


torch.manual_seed(17)
model = Separator()
optimizer = build_optimizer(model)
for step in range(150):
    mix, target = spectra(8)
    loss = (model(mix) - target).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item() * 1e6:.4f} [1e-6]")
