"""A patch encoder for the cameras of a rig, with a head for points and two for rays."""

import torch
from torch import nn

TOKENS, DIM = 64, 48


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.proj(nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None]).squeeze(1))
        return x + self.mlp(self.norm2(x))


class RayHead(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.hidden = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, 3)

    def forward(self, x):
        return self.out(torch.nn.functional.gelu(self.hidden(x)))


class RigNet(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.patch = nn.Linear(features, DIM)
        self.blocks = nn.Sequential(Block(DIM), Block(DIM))
        self.points = nn.Linear(DIM, 3)
        self.pose_rays, self.rig_rays = RayHead(DIM), RayHead(DIM)

    def forward(self, patches):
        x = self.blocks(self.patch(patches))
        return {"points": self.points(x), "pose_rays": self.pose_rays(x), "rig_rays": self.rig_rays(x)}
