"""Points in metres and the directions of two ray maps."""

import torch.nn.functional as F
from torch import nn


class MultiTaskLoss(nn.Module):
    def __init__(self, rays=0.005):
        super().__init__()
        self.rays = rays

    def forward(self, out, target):
        points = F.mse_loss(out["points"].float(), target["points"])
        pose = (1 - F.cosine_similarity(out["pose_rays"].float(), target["pose_rays"], dim=-1)).mean()
        rig = (1 - F.cosine_similarity(out["rig_rays"].float(), target["rig_rays"], dim=-1)).mean()
        return points, pose, rig, points + self.rays * (pose + rig)
