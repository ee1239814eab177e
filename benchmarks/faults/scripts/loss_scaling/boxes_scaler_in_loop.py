"""A one-box detector. The training step builds everything it needs, the gradient scaler included."""

import torch
from torch import nn
from torch.amp import GradScaler, autocast


class TinyDetector(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(4)
        )
        self.box = nn.Linear(512, 4)
        self.score = nn.Linear(512, 1)

    def forward(self, x):
        x = self.features(x).flatten(1)
        return self.box(x), self.score(x)


def scenes(n, size=32):
    image = 0.2 * torch.randn(n, 1, size, size)
    corner = torch.randint(0, size - 14, (n, 2))
    extent = torch.randint(6, 14, (n, 2))
    present = torch.rand(n) < 0.8
    for i in range(n):
        if present[i]:
            (y, x), (h, w) = corner[i].tolist(), extent[i].tolist()
            image[i, 0, y : y + h, x : x + w] += 1.0
    return image, torch.cat([corner, extent], 1).float(), present.float()


def train_step(model, optimizer, batch):
    scaler = GradScaler("cpu")
    image, box, present = batch
    optimizer.zero_grad()
    with autocast("cpu", dtype=torch.float16):
        pred, score = model(image)
    regression = nn.functional.mse_loss(pred.float(), box, reduction="none").sum(1)
    loss = (regression * present).mean() + nn.functional.binary_cross_entropy_with_logits(score[:, 0].float(), present)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


def main():
    torch.manual_seed(14)
    model = TinyDetector()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(80):
        loss = train_step(model, optimizer, scenes(16))
        if step % 4 == 0:
            print(f"step {step} loss {loss:.4f}")


if __name__ == "__main__":
    main()
