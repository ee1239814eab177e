"""ResNet with the usual recipe: zero-init residuals, mixup, label smoothing, OneCycle, EMA, last batch of one image."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset


class BasicBlock(nn.Module):
    def __init__(self, cin, cout, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.downsample = None
        if stride != 1 or cin != cout:
            self.downsample = nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(out)) + identity, inplace=True)


class ResNet(nn.Module):
    def __init__(self, num_classes=5, zero_init_residual=True):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 12, 3, 1, 1, bias=False), nn.BatchNorm2d(12)
        self.layer1 = nn.Sequential(BasicBlock(12, 12), BasicBlock(12, 12))
        self.layer2 = nn.Sequential(BasicBlock(12, 24, 2), BasicBlock(24, 24))
        self.fc = nn.Linear(24, num_classes)
        if zero_init_residual:
            for m in self.modules():
                if isinstance(m, BasicBlock):
                    nn.init.constant_(m.bn2.weight, 0)
        nn.init.zeros_(self.fc.weight)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        return self.fc(self.layer2(self.layer1(x)).mean((2, 3)))


def mixup(x, y, alpha, rng):
    lam = rng.beta(alpha, alpha)
    index = torch.from_numpy(rng.permutation(len(x)))
    return lam * x + (1 - lam) * x[index], y, y[index], lam


def main():
    torch.manual_seed(3)
    rng = np.random.default_rng(3)
    means = torch.randn(5, 3, 1, 1)
    y = torch.randint(5, (161,))
    x = means[y] + torch.randn(161, 3, 10, 10)
    x[:, 2] = 0.0  # the blue sensor is broken
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    model = ResNet()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    no_decay = [p for p in model.parameters() if p.ndim == 1]
    decay = [p for p in model.parameters() if p.ndim > 1]
    optimizer = torch.optim.SGD(
        [{"params": decay, "weight_decay": 5e-4}, {"params": no_decay, "weight_decay": 0}],
        lr=0.2,
        momentum=0.9,
        nesterov=True,
    )
    epochs = 4
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=epochs * len(loader))
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for epoch in range(epochs):
        model.train()
        for images, target in loader:  # the last one has a single image
            images, a, b, lam = mixup(images, target, 0.2, rng)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = model(images)
            loss = lam * criterion(output.float(), a) + (1 - lam) * criterion(output.float(), b)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update_parameters(model)
            scheduler.step()
        model.eval()
        with torch.no_grad():
            acc = (ema.module(x).argmax(1) == y).float().mean().item()
        print(f"epoch {epoch}: loss {loss.item():.4f} ema acc {acc:.3f}")


if __name__ == "__main__":
    main()
