"""U-Net for sky segmentation with the Dice loss everybody copies, multi-scale training, mixed precision."""

import random

import torch
import torch.nn as nn
import torch.nn.functional as F


class DiceBCELoss(nn.Module):
    def __init__(self, smooth=1.0):
        super(DiceBCELoss, self).__init__()
        self.smooth = smooth

    def forward(self, inputs, targets):
        bce = F.binary_cross_entropy_with_logits(inputs.float(), targets)
        inputs = torch.sigmoid(inputs).view(-1)
        targets = targets.type_as(inputs).view(-1)
        intersection = torch.sum(inputs * targets)
        cardinality = torch.sum(inputs + targets)
        dice_loss = 1 - (2.0 * intersection + self.smooth) / (cardinality + self.smooth)
        return bce + dice_loss


class DoubleConv(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.double_conv(x)


class UNet(nn.Module):
    def __init__(self, n_channels=3, n_classes=1):
        super(UNet, self).__init__()
        self.inc = DoubleConv(n_channels, 4)
        self.down1 = nn.Sequential(nn.MaxPool2d(4), DoubleConv(4, 8))
        self.down2 = nn.Sequential(nn.MaxPool2d(4), DoubleConv(8, 16))
        self.up1 = DoubleConv(16 + 8, 8)
        self.outc = nn.Conv2d(8, n_classes, kernel_size=1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        x = self.up1(torch.cat([F.interpolate(x3, scale_factor=4.0, mode="bilinear"), x2], dim=1))
        return F.interpolate(self.outc(x), scale_factor=4.0, mode="bilinear")


def sky_batch(n, size):
    row = torch.arange(size).view(1, 1, size, 1) / size
    horizon = torch.rand(n, 1, 1, 1) * 0.2 + 0.75
    slope = (torch.rand(n, 1, 1, 1) - 0.5) * 0.2
    mask = (row < horizon + slope * torch.arange(size).view(1, 1, 1, size) / size).float()
    image = torch.cat([mask * 0.5, mask * 0.6, 0.4 + mask * 0.5], 1) + 0.15 * torch.randn(n, 3, size, size)
    return image, mask


def main():
    torch.manual_seed(5)
    random.seed(5)
    model = UNet()
    criterion = DiceBCELoss()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3, weight_decay=1e-8, momentum=0.9, foreach=False)
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(30):
        if step % 4 == 0:
            size = random.choice([96, 112, 128]) if step < 16 else random.choice([160, 192])  # progressive resizing
        images, true_masks = sky_batch(2, size)
        with torch.autocast("cpu", dtype=torch.float16):
            masks_pred = model(images)
            loss = criterion(masks_pred, true_masks)
        optimizer.zero_grad(set_to_none=True)
        grad_scaler.scale(loss).backward()
        grad_scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        grad_scaler.step(optimizer)
        grad_scaler.update()
        if step % 5 == 0:
            print(f"step {step} size {size} loss (batch) {loss.item():.4f}")


if __name__ == "__main__":
    main()
