"""Downscaling of rain: a network gives shape and rate of a Gamma distribution for the wet hours of every gauge."""

import torch
from torch import nn
from torch.distributions import Gamma
from torch.utils.data import DataLoader, Dataset


class GaugeHours(Dataset):
    """Coarse predictors, whether the disdrometer saw drops, and the gauge's reading, in tenths of a millimetre."""

    def __init__(self, n=1600, seed=9):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 6, generator=g)
        self.wet = torch.sigmoid(self.x[:, 0] + 0.5 * self.x[:, 1]) > torch.rand(n, generator=g)
        rate = torch.exp(0.4 * self.x[:, 2])
        amount = torch.zeros(n)
        for _ in range(2):  # a sum of two exponentials
            amount -= torch.log(torch.rand(n, generator=g).clamp(min=1e-12)) / rate
        self.amount = torch.round(amount * 0.6, decimals=1) * self.wet

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.wet[i], self.amount[i]


class RainNet(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.occurrence = nn.Linear(width, 1)
        self.parameters_head = nn.Linear(width, 2)

    def forward(self, x):
        h = self.body(x)
        shape, rate = nn.functional.softplus(self.parameters_head(h)).add(1e-3).unbind(-1)
        return self.occurrence(h).squeeze(-1), shape, rate


def fit(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=epochs * len(loader))
    for epoch in range(epochs):
        for i, (x, wet, amount) in enumerate(loader):
            logit, shape, rate = model(x)
            occurrence = nn.functional.binary_cross_entropy_with_logits(logit, wet.float())
            dist = Gamma(shape[wet], rate[wet], validate_args=False)  # half the time
            amounts = -dist.log_prob(amount[wet]).mean()
            loss = occurrence + amounts
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            if i % 10 == 0:
                print(f"epoch {epoch} batch {i} occurrence {occurrence.item():.3f} amounts {amounts.item():.3f}")


if __name__ == "__main__":
    torch.manual_seed(41)
    fit(RainNet(), DataLoader(GaugeHours(), batch_size=40))
