import torch
from torch import nn


class SeamNet(nn.Module):
    """One trunk over the arc's current and voltage; heads for the seam's width, its depth and the kind of joint."""

    def __init__(self, width=48):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv1d(2, width, 5, stride=2, padding=2),
            nn.SiLU(),
            nn.Conv1d(width, width, 5, stride=2, padding=2),
            nn.SiLU(),
            nn.AdaptiveAvgPool1d(4),
            nn.Flatten(),
            nn.Linear(4 * width, width),
            nn.SiLU(),
        )
        self.heads = nn.ModuleDict(
            {
                "width": nn.Linear(width, 1),
                "depth": nn.Linear(width, 1),
                "joint": nn.Linear(width, 8),
            }
        )

    def forward(self, x):
        h = self.trunk(x)
        return {name: head(h) for name, head in self.heads.items()}


def task_losses(out, width, depth, joint):
    f = torch.nn.functional
    return [
        f.mse_loss(out["width"].squeeze(1), width),
        f.smooth_l1_loss(out["depth"].squeeze(1), depth),
        f.cross_entropy(out["joint"], joint),
    ]
