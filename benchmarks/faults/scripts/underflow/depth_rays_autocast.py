"""Depth and ray directions from one image; FP16 autocast, and nobody thought of a GradScaler."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH, SIZE, EPOCHS = 8, 32, 4
device = "cpu"


def conv_block(c_in, c_out, stride=1):
    return nn.Sequential(
        nn.Conv2d(c_in, c_out, 3, stride=stride, padding=1), nn.GroupNorm(4, c_out), nn.ReLU(inplace=True)
    )


class RayDepthNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.stem = conv_block(3, width)
        self.down = conv_block(width, 2 * width, stride=2)
        self.bottleneck = conv_block(2 * width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.depth_head = nn.Conv2d(width, 1, 1)
        self.ray_head = nn.Sequential(conv_block(width, width), nn.Conv2d(width, 3, 1))

    def forward(self, images):
        skip = self.stem(images)
        x = self.up(self.bottleneck(self.down(skip))) + skip
        return {"depth": F.softplus(self.depth_head(x)), "rays": F.normalize(self.ray_head(x).float(), dim=1)}


class MultiTaskLoss(nn.Module):
    def __init__(self, ray_weight=3e-4):
        super().__init__()
        self.ray_weight = ray_weight

    def forward(self, out, depth, rays):
        depth_loss = F.mse_loss(out["depth"].float(), depth)
        ray_loss = (1 - (out["rays"] * rays).sum(1)).mean()
        return {"total": depth_loss + self.ray_weight * ray_loss, "depth": depth_loss, "rays": ray_loss}


def make_dataset(n):
    yy, xx = torch.meshgrid(torch.linspace(-1, 1, SIZE), torch.linspace(-1, 1, SIZE), indexing="ij")
    focal = 0.8 + 0.8 * torch.rand(n, 1, 1)
    rays = F.normalize(torch.stack([xx / focal, yy / focal, torch.ones(n, SIZE, SIZE)], 1), dim=1)
    tilt = torch.randn(n, 2, 1, 1)
    depth = (3 + tilt[:, :1] * xx + tilt[:, 1:] * yy).clamp(min=0.5)
    images = torch.cat([depth / 3 - 1, rays[:, :1] * depth, rays[:, 1:2] * depth], 1)
    return TensorDataset(images + 0.05 * torch.randn_like(images), depth, rays)


def main():
    torch.manual_seed(501)
    loader = DataLoader(make_dataset(88), batch_size=BATCH, shuffle=True, drop_last=True)
    val = DataLoader(make_dataset(16), batch_size=BATCH)
    model, criterion = RayDepthNet().to(device), MultiTaskLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))
    for epoch in range(EPOCHS):
        model.train()
        for i, (images, depth, rays) in enumerate(loader):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device_type=device, dtype=torch.float16):
                outputs = model(images.to(device))
                losses = criterion(outputs, depth.to(device), rays.to(device))
            losses["total"].backward()
            optimizer.step()
            scheduler.step()
            if i % 4 == 0:
                print(f"[{epoch}:{i:02d}] loss {losses['rays'].item():.5f} depth {losses['depth'].item():.4f}")
        model.eval()
        with torch.no_grad(), torch.autocast(device_type=device, dtype=torch.float16):
            scores = [criterion(model(x), d, r)["rays"].item() for x, d, r in val]
        print(f"epoch {epoch} validation rays {sum(scores) / len(scores):.5f}")


if __name__ == "__main__":
    main()
