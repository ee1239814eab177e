"""Two tasks on street scenes: object classes of patches, and their distance. FP16 autocast."""

from dataclasses import dataclass

import torch
from torch import nn, Tensor
from torch.nn import functional as F


@dataclass
class Config:
    patches: int = 96
    width: int = 40
    classes: int = 7
    steps: int = 120
    batch: int = 16
    lr: float = 2e-3
    class_weight: float = 1.0
    distance_weight: float = 1e-4


class DistanceBranch(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.reduce = nn.Linear(d, 32)
        self.hidden = nn.Linear(32, 32)
        self.refine = nn.Linear(32, 32)
        self.out = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.reduce(x.detach()))
        x = F.silu(self.hidden(x))
        x = F.silu(self.refine(x))
        return self.out(x).squeeze(-1)


class ClassBranch(nn.Module):
    def __init__(self, d: int, classes: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(d, 48)
        self.out = nn.Linear(48, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.silu(self.hidden(x)))


class Scene(nn.Module):
    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.patch = nn.Linear(27, cfg.width)
        self.mixer = nn.ModuleList(nn.Linear(cfg.width, cfg.width) for _ in range(3))
        self.branches = nn.ModuleDict(
            {"classes": ClassBranch(cfg.width, cfg.classes), "distance": DistanceBranch(cfg.width)}
        )

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        x = self.patch(pixels)
        for layer in self.mixer:
            x = x + F.silu(layer(x))
        return {name: branch(x) for name, branch in self.branches.items()}


def scenes(cfg: Config, look: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    kind = torch.randint(cfg.classes, (cfg.batch, cfg.patches))
    distance = torch.rand(cfg.batch, cfg.patches)
    pixels = look[kind] * (1.4 - distance[..., None]) + 1.2 * torch.randn(cfg.batch, cfg.patches, 27)
    return pixels, kind, distance


def train(cfg: Config) -> Scene:
    torch.manual_seed(4)
    look = torch.randn(cfg.classes, 27)
    model = Scene(cfg)
    opt = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    for step in range(cfg.steps):
        pixels, kind, distance = scenes(cfg, look)
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(pixels)
        by_class = F.cross_entropy(out["classes"].float().flatten(0, 1), kind.flatten())
        by_distance = F.mse_loss(out["distance"].float(), distance)
        opt.zero_grad()
        (cfg.class_weight * by_class + cfg.distance_weight * by_distance).backward()
        opt.step()
        if step % 8 == 0:
            print(f"{step} classes {by_class.item():.4f} distance loss {by_distance.item():.5f}")
    return model


if __name__ == "__main__":
    train(Config())
