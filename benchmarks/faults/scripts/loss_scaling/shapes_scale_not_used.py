"""Point-cloud classifier, moved to FP16 AMP following the recipe: scale, backward, step, update."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class PointNet(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.point = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 48), nn.ReLU())
        self.classify = nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, classes))

    def forward(self, xyz):
        return self.classify(self.point(xyz).amax(1))


def clouds(n, points=24):
    y = torch.randint(4, (n,))
    p = F.normalize(torch.randn(n, points, 3), dim=-1)
    squash = torch.tensor([[1, 1, 1], [1, 1, 0.1], [0.2, 0.2, 1.5], [1.2, 0.1, 1.2]])[y]
    return p * squash.unsqueeze(1) + 0.03 * torch.randn(n, points, 3), y


class Trainer:
    def __init__(self, model, lr=0.1):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu")

    def training_step(self, xyz, y):
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(self.model(xyz).float(), y)
        self.scaler.scale(loss)
        loss.backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()


def main():
    torch.manual_seed(7004)
    trainer = Trainer(PointNet())
    for step in range(70):
        loss = trainer.training_step(*clouds(32))
        if step % 4 == 0:
            print(f"step {step:3d} loss {loss:.4f} scale {trainer.scaler.get_scale():.0f}")


main()
