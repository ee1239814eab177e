"""Semantic labels and depth from one FP16 encoder; FP32 losses, weighted as in the configuration."""

import torch
from torch import nn
from torch.nn import functional as F

WEIGHTS = {"labels": 1.0, "depth": 1e-4}


class Scene(nn.Module):
    def __init__(self, width=12, classes=4):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.label_head = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, classes, 1))
        self.depth_head = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 1, 1))

    def forward(self, image):
        x = F.relu(self.stem(image))
        return self.label_head(x), self.depth_head(x)


class HalfWithMasters:
    """The model in FP16, its weights in FP32 beside it for the optimizer."""

    def __init__(self, model, lr):
        self.model = model
        self.masters = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
        self.optimizer = torch.optim.Adam(self.masters, lr=lr, eps=1e-12)

    def step(self):
        for master, p in zip(self.masters, self.model.parameters()):
            master.grad = p.grad.to(master.dtype)
            p.grad = None
        self.optimizer.step()
        with torch.no_grad():
            for master, p in zip(self.masters, self.model.parameters()):
                p.copy_(master)


def rooms(n, size=16):
    """Stripes of four materials; depth is a smooth function of colour and place."""
    label = torch.randint(4, (n, 1, size // 8)).repeat_interleave(8, 2).expand(n, size, size)
    colour = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.5, 0.5, 0.0]])
    image = colour[label].permute(0, 3, 1, 2) + 0.1 * torch.randn(n, 3, size, size)
    depth = 1.0 + 0.5 * image[:, :1] - 0.25 * image[:, 2:]
    return image, label, depth


def losses(model, image, label, depth):
    labels, distance = model(image.half())
    return {
        "labels": F.cross_entropy(labels.float(), label),
        "depth": F.smooth_l1_loss(distance.float(), depth),
    }


def main():
    torch.manual_seed(21008)
    model = Scene().half()
    training = HalfWithMasters(model, lr=3e-3)
    for step in range(40):
        parts = losses(model, *rooms(6))
        sum(WEIGHTS[name] * part for name, part in parts.items()).backward()
        training.step()
        if step % 2 == 0:
            print(f"step {step} depth_loss {parts['depth'].item():.4f} labels {parts['labels'].item():.4f}")


if __name__ == "__main__":
    main()
