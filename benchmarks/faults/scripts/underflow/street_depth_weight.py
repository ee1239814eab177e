"""Street scenes: one trunk, a head for the class of the scene and one for a coarse depth map."""

import torch
import torch.nn.functional as F
from torch import nn

DEPTH_WEIGHT = 2e-5  # as in the config of the paper, whose depths are millimetres


class SceneNet(nn.Module):
    def __init__(self, features=24, width=64, classes=5, cells=64):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(features, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.class_head = nn.Linear(width, classes)
        self.depth_head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, cells))

    def forward(self, x):
        h = self.trunk(x)
        return self.class_head(h), self.depth_head(h)


class Scenes:
    def __init__(self, features=24, classes=5, cells=64):
        self.centres = torch.randn(classes, features)
        self.to_depth = torch.randn(features, cells) / features**0.5

    def batch(self, size):
        y = torch.randint(0, len(self.centres), (size,))
        x = self.centres[y] + 0.7 * torch.randn(size, self.centres.shape[1])
        return x, y, torch.tanh(x @ self.to_depth) + 0.05 * torch.randn(size, self.to_depth.shape[1])


class MultiTaskTrainer:
    def __init__(self, model, data, lr=3e-3):
        self.model, self.data = model, data
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)

    def losses(self, x, y, depth):
        with torch.autocast("cpu", dtype=torch.float16):
            logits, predicted = self.model(x)
        return F.cross_entropy(logits.float(), y), F.mse_loss(predicted.float(), depth)

    def fit(self, steps):
        for step in range(steps):
            classes, depth = self.losses(*self.data.batch(64))
            self.optimizer.zero_grad()
            (classes + DEPTH_WEIGHT * depth).backward()
            self.optimizer.step()
            if step % 5 == 4:
                print(f"step {step + 1:3d}  classes {classes.item():.4f}  depth loss {depth.item():.4f}")


if __name__ == "__main__":
    torch.manual_seed(3101)
    MultiTaskTrainer(SceneNet(), Scenes()).fit(60)
