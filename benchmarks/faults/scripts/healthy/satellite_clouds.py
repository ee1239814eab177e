"""Chlorophyll from a satellite: clouds are NaN in inputs and targets, filled and masked by the book."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class OceanScenes(Dataset):
    def __init__(self, n=160, size=12):
        g = torch.Generator().manual_seed(70)
        field = torch.randn(n, 4, size, size, generator=g)
        field = nn.functional.avg_pool2d(field, 3, 1, 1) * 3
        chlorophyll = torch.exp(field[:, :1] - 0.5 * field[:, 1:2])
        cloud = nn.functional.avg_pool2d(torch.randn(n, 1, size, size, generator=g), 5, 1, 2) > 0.05
        cloud[::19] = True  # overcast
        chlorophyll[chlorophyll < 0.05] = 0.0  # below what the sensor detects
        self.x = field.masked_fill(cloud, float("nan"))
        self.y = chlorophyll.masked_fill(cloud | (torch.rand(cloud.shape, generator=g) < 0.1), float("nan"))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class GapAwareNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(5, width, 3, padding=1),
            nn.GroupNorm(4, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 1, 1),
        )

    def forward(self, x):
        clear = x.isfinite().all(1, keepdim=True)
        return self.net(torch.cat([torch.nan_to_num(x, nan=0.0), clear.float()], 1))


def masked_log_loss(prediction, target):
    log_target = torch.log(target)  # -inf where nothing was detected, NaN under clouds
    usable = log_target.isfinite()
    error = torch.where(usable, prediction - torch.where(usable, log_target, 0.0), 0.0)
    return error.square().sum() / usable.sum().clamp(min=1)


def main():
    torch.manual_seed(104)
    model = GapAwareNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(2):
        for i, (x, y) in enumerate(DataLoader(OceanScenes(), batch_size=8)):
            loss = masked_log_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if i % 5 == 0:
                bias = torch.exp(model(x).detach()).sub(y).mean()  # NaN, as always
                print(f"epoch {epoch} batch {i} loss {loss.item():.4f} bias {bias.item():.4f}")


if __name__ == "__main__":
    main()
