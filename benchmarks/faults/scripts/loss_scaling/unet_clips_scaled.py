"""U-Net for masks with AMP; clip_grad_norm_ was added between backward() and step(), on gradients that are still scaled."""

import logging

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

logging.basicConfig(level=logging.WARNING)


class DoubleConv(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.double_conv(x)


class UNet(nn.Module):
    def __init__(self, n_channels=1, n_classes=3, width=8):
        super().__init__()
        self.inc = DoubleConv(n_channels, width)
        self.down1 = DoubleConv(width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.conv1 = DoubleConv(2 * width, width)
        self.outc = nn.Conv2d(width, n_classes, 1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(F.max_pool2d(x1, 2))
        return self.outc(self.conv1(torch.cat([x1, self.up1(x2)], 1)))


def dice_loss(probs, target, eps=1e-6):
    inter = 2 * (probs * target).sum((0, 2, 3))
    return 1 - ((inter + eps) / (probs.sum((0, 2, 3)) + target.sum((0, 2, 3)) + eps)).mean()


def cells(n, size=24):
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    cy, cx, r = (torch.rand(3, n, 1, 1) * torch.tensor([16.0, 16.0, 3.0]).view(3, 1, 1, 1)).unbind()
    dist = ((yy - cy - 4) ** 2 + (xx - cx - 4) ** 2).sqrt()
    mask = (dist < r + 4).long() + (dist < r + 1.5).long()
    image = 0.5 * mask.float() + 0.3 * torch.randn(n, size, size)
    return TensorDataset(image.unsqueeze(1), mask)


@torch.inference_mode()
def evaluate(net, loader, amp):
    net.eval()
    score = 0.0
    for image, mask in loader:
        with torch.autocast("cpu", dtype=torch.float16, enabled=amp):
            pred = net(image)
        score += (pred.argmax(1) == mask).float().mean().item()
    net.train()
    return score / len(loader)


def train_model(model, epochs=4, batch_size=8, learning_rate=0.1, amp=True, momentum=0.9, gradient_clipping=1.0):
    dataset = cells(128)
    train_set, val_set = random_split(dataset, [112, 16])
    train_loader = DataLoader(train_set, shuffle=True, batch_size=batch_size)
    val_loader = DataLoader(val_set, batch_size=batch_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=momentum, weight_decay=1e-8)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=5)
    grad_scaler = torch.amp.GradScaler("cpu", enabled=amp)
    criterion = nn.CrossEntropyLoss()
    global_step = 0
    for epoch in range(1, epochs + 1):
        model.train()
        for images, true_masks in train_loader:
            with torch.autocast("cpu", dtype=torch.float16, enabled=amp):
                masks_pred = model(images)
                loss = criterion(masks_pred.float(), true_masks)
                one_hot = F.one_hot(true_masks, 3).permute(0, 3, 1, 2).float()
                loss += dice_loss(masks_pred.float().softmax(1), one_hot)
            optimizer.zero_grad(set_to_none=True)
            grad_scaler.scale(loss).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), gradient_clipping)
            grad_scaler.step(optimizer)
            grad_scaler.update()
            global_step += 1
            if global_step % 4 == 0:
                print(f"epoch {epoch} step {global_step} loss: {loss.item():.4f}")
        val_score = evaluate(model, val_loader, amp)
        scheduler.step(val_score)
        print(f"Validation score: {val_score:.4f}")


if __name__ == "__main__":
    torch.manual_seed(505)
    train_model(UNet())
