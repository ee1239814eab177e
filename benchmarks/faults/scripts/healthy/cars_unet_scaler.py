"""U-Net for cars in FP16 with a GradScaler as it comes (scale 65536) and a summed loss: the first steps are skipped."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def conv_block(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), nn.GroupNorm(4, cout), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc1, self.enc2 = conv_block(3, 8), conv_block(8, 16)
        self.mid = conv_block(16, 32)
        self.up2, self.dec2 = nn.ConvTranspose2d(32, 16, 2, 2), conv_block(32, 16)
        self.up1, self.dec1 = nn.ConvTranspose2d(16, 8, 2, 2), conv_block(16, 8)
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        e1 = self.enc1(x)
        e2 = self.enc2(F.max_pool2d(e1, 2))
        m = self.mid(F.max_pool2d(e2, 2))
        d2 = self.dec2(torch.cat([self.up2(m), e2], 1))
        return self.head(self.dec1(torch.cat([self.up1(d2), e1], 1)))


def dice_coeff(pred, target, eps=1e-6):
    inter = 2 * (pred * target).sum()
    return (inter + eps) / (pred.sum() + target.sum() + eps)


def batch(n, g):
    image = torch.rand(n, 3, 32, 32, generator=g) * 0.4
    mask = torch.zeros(n, 1, 32, 32)
    for i in range(n):
        y, x = torch.randint(4, 16, (2,), generator=g).tolist()
        mask[i, 0, y : y + 10, x : x + 12] = 1.0
    return image + mask * 0.5, mask


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(2)
    net = UNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu")
    skipped = 0
    for step in range(36):
        image, mask = batch(6, g)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = net(image)
        logits = logits.float()
        # summed over rows, averaged over the rest
        loss = 32 * F.binary_cross_entropy_with_logits(logits, mask) + 4 * (1 - dice_coeff(logits.sigmoid(), mask))
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
        if step % 6 == 0:
            print(f"{step} loss {loss.item():.2f} scale {scaler.get_scale():g} skipped {skipped}")


main()
