"""U-Net segmentation with a generalised Dice loss (class weights from the batch)."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def double_conv(cin, cout):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, padding=1),
        nn.BatchNorm2d(cout),
        nn.ReLU(inplace=True),
        nn.Conv2d(cout, cout, 3, padding=1),
        nn.BatchNorm2d(cout),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self, n_classes):
        super().__init__()
        self.down1 = double_conv(1, 8)
        self.down2 = double_conv(8, 16)
        self.bottom = double_conv(16, 32)
        self.up2 = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.dec2 = double_conv(32, 16)
        self.up1 = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.dec1 = double_conv(16, 8)
        self.out = nn.Conv2d(8, n_classes, 1)

    def forward(self, x):
        d1 = self.down1(x)
        d2 = self.down2(F.max_pool2d(d1, 2))
        b = self.bottom(F.max_pool2d(d2, 2))
        u2 = self.dec2(torch.cat([self.up2(b), d2], dim=1))
        u1 = self.dec1(torch.cat([self.up1(u2), d1], dim=1))
        return self.out(u1)


class GeneralizedDiceLoss(nn.Module):
    """Sudre et al. 2017: each class is weighted by the inverse square of its volume."""

    def forward(self, logits, target):
        probs = logits.softmax(dim=1)
        onehot = F.one_hot(target, logits.size(1)).permute(0, 3, 1, 2).float()
        volume = onehot.sum(dim=(0, 2, 3))
        weight = 1.0 / volume**2
        intersection = (weight * (probs * onehot).sum(dim=(0, 2, 3))).sum()
        union = (weight * (probs + onehot).sum(dim=(0, 2, 3))).sum()
        return 1 - 2 * intersection / union


def make_scan(generator, with_lesion):
    image = torch.randn(1, 32, 32, generator=generator) * 0.1
    mask = torch.zeros(32, 32, dtype=torch.long)
    mask[8:24, 8:24] = 1
    if with_lesion:
        row, column = torch.randint(9, 20, (2,), generator=generator).tolist()
        mask[row : row + 3, column : column + 3] = 2
    return image + mask * 0.7, mask


def main():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(5)
    net = UNet(3)
    criterion = GeneralizedDiceLoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    # four scans in ten show a lesion
    patients = [make_scan(generator, torch.rand((), generator=generator).item() < 0.4) for _ in range(48)]
    for epoch in range(2):
        for start in range(0, len(patients), 4):
            images = torch.stack([p[0] for p in patients[start : start + 4]])
            masks = torch.stack([p[1] for p in patients[start : start + 4]])
            optimizer.zero_grad()
            loss = criterion(net(images), masks)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} dice loss {loss.item():.4f}")


main()
