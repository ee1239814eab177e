"""Super-resolution of elevation tiles: the raster's nodata value is the lowest float, and the sea has no elevation."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

NODATA = -3.4028234663852886e38


class ElevationTiles(Dataset):
    """Tiles from the mountains to the coast, in kilometres."""

    def __init__(self, n=160, size=16, coast_from=90):
        g = torch.Generator().manual_seed(44)
        self.tiles = []
        for i in range(n):
            coarse = torch.rand(1, 1, 4, 4, generator=g) * 2.5
            tile = nn.functional.interpolate(coarse, size=(size, size), mode="bicubic")[0]
            tile = tile + 0.05 * torch.randn(1, size, size, generator=g)
            if i >= coast_from and i % 7 == 0:
                tile[:, size // 2 :] = NODATA
            self.tiles.append(tile)

    def __len__(self):
        return len(self.tiles)

    def __getitem__(self, i):
        tile = self.tiles[i]
        return tile[:, ::2, ::2], tile


class ReliefSR(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.head = nn.Conv2d(1, width, 5, padding=2)
        self.body = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(3))
        self.tail = nn.Sequential(nn.Conv2d(width, 4, 3, padding=1), nn.PixelShuffle(2))

    def forward(self, x):
        h = self.head(x)
        for conv in self.body:
            h = h + nn.functional.silu(conv(h))
        return self.tail(h)


def valid_l1(prediction, target):
    valid = target > -1e3
    return (prediction[valid] - target[valid]).abs().mean()


def main():
    torch.manual_seed(10)
    model = ReliefSR()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = DataLoader(ElevationTiles(), batch_size=8)
    for step, (low, high) in enumerate(loader):
        loss = valid_l1(model(low), high)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 0:
            print(f"step {step} L1 {1000 * loss.item():.1f} m")


if __name__ == "__main__":
    main()
