"""A one-stage detector in FP16 with SGD; the gradient norm is held below 10 right after backward()."""

import torch
import torch.nn as nn
from torch.optim import lr_scheduler


class ConvBNSiLU(nn.Module):
    def __init__(self, c1, c2, s=1):
        super().__init__()
        self.conv = nn.Conv2d(c1, c2, 3, s, 1, bias=False)
        self.bn = nn.BatchNorm2d(c2, eps=1e-3, momentum=0.03)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.act(self.bn(self.conv(x)))


class TinyYOLO(nn.Module):
    def __init__(self, classes=3, w=8):
        super().__init__()
        self.backbone = nn.Sequential(ConvBNSiLU(1, w, 2), ConvBNSiLU(w, 2 * w, 2), ConvBNSiLU(2 * w, 4 * w))
        self.detect = nn.Conv2d(4 * w, 5 + classes, 1)

    def forward(self, x):
        return self.detect(self.backbone(x)).permute(0, 2, 3, 1)


class ComputeLoss:
    def __init__(self, box=0.05, obj=1.0, cls=0.5):
        self.gains = box, obj, cls
        self.bce = nn.BCEWithLogitsLoss()

    def __call__(self, p, targets):
        cell, box, label = targets
        b = torch.arange(len(p))
        hit = p[b, cell[:, 0], cell[:, 1]]
        tobj = torch.zeros(p.shape[:3])
        tobj[b, cell[:, 0], cell[:, 1]] = 1.0
        lbox = (hit[:, 1:5].sigmoid() - box).abs().sum(-1).mean()
        lcls = self.bce(hit[:, 5:], nn.functional.one_hot(label, 3).float())
        g = self.gains
        return len(p) * (g[0] * lbox + g[1] * self.bce(p[..., 0], tobj) + g[2] * lcls)


def scenes(n, size=32, stride=4):
    cell, box, label = torch.randint(size // stride, (n, 2)), 0.2 + 0.6 * torch.rand(n, 4), torch.randint(3, (n,))
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    centre = (cell + box[:, :2]) * stride
    dy, dx = (yy - centre[:, 0, None, None]).abs(), (xx - centre[:, 1, None, None]).abs()
    r = 6 * box[:, 2, None, None]
    shapes = torch.stack([((dy**2 + dx**2).sqrt() < r), torch.maximum(dy, dx) < r, (dy + dx) < r], 1)
    image = shapes[torch.arange(n), label].float() + 0.1 * torch.randn(n, size, size)
    return image.unsqueeze(1), (cell, box, label)


class Trainer:
    def __init__(self, epochs=5, nb=24):
        self.model = TinyYOLO()
        self.epochs, self.nb = epochs, nb
        decay = [p for p in self.model.parameters() if p.dim() > 1]
        other = [p for p in self.model.parameters() if p.dim() <= 1]
        self.optimizer = torch.optim.SGD(other, lr=0.01, momentum=0.937, nesterov=True)
        self.optimizer.add_param_group({"params": decay, "weight_decay": 5e-4})
        self.scheduler = lr_scheduler.LambdaLR(self.optimizer, lambda x: (1 - x / epochs) * 0.99 + 0.01)
        self.scaler = torch.amp.GradScaler("cpu")
        self.compute_loss = ComputeLoss()

    def optimizer_step(self):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=10.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def train(self):
        for epoch in range(self.epochs):
            for ni in range(self.nb):
                images, targets = scenes(16)
                with torch.autocast("cpu", dtype=torch.float16):
                    preds = self.model(images)
                loss = self.compute_loss(preds.float(), targets)
                self.scaler.scale(loss).backward()
                self.optimizer_step()
                if ni % 3 == 0:
                    print(f"{epoch}/{self.epochs - 1} {ni:3d} loss {loss.item():.4f}")
            self.scheduler.step()


if __name__ == "__main__":
    torch.manual_seed(604)
    Trainer().train()
