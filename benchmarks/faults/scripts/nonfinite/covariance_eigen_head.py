"""EEG windows classified by the log-eigenvalues and main direction of their channel covariance (a small SPD network)."""

import torch
from torch import nn


class SpectralHead(nn.Module):
    """Logarithm of an SPD matrix through its eigenvectors."""

    def __init__(self, channels, classes, floor=1e-3):
        super().__init__()
        self.floor = floor
        self.out = nn.Linear(channels * channels, classes)

    def forward(self, cov):
        values, vectors = torch.linalg.eigh(cov)
        logs = values.clamp(min=self.floor).log()
        log_cov = vectors @ torch.diag_embed(logs) @ vectors.mT
        return self.out(log_cov.flatten(1))


class SPDNet(nn.Module):
    def __init__(self, electrodes=8, channels=5, classes=3):
        super().__init__()
        self.spatial = nn.Conv1d(electrodes, channels, 1, bias=False)
        self.head = SpectralHead(channels, classes)

    def forward(self, x):
        s = self.spatial(x)
        cov = s @ s.mT / s.shape[-1]
        return self.head(cov)


def windows(n, generator, flat=None):
    y = torch.randint(3, (n,), generator=generator)
    mixing = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(0))
    x = mixing[y] @ torch.randn(n, 8, 64, generator=generator)
    if flat is not None:
        x[flat] = 0.0  # the amplifier was off
    return x, y


def main():
    torch.manual_seed(12)
    generator = torch.Generator().manual_seed(13)
    model = SPDNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(24):
        x, y = windows(10, generator, flat=4 if step == 13 else None)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 6 == 0:
            print(f"{step:3d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
