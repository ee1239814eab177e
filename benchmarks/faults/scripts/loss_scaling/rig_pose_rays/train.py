"""Trains the rig reconstruction network with autocast; prints the losses of the ray maps."""

import torch
from losses import MultiTaskLoss
from model import TOKENS, RigNet

torch.manual_seed(35)
FEATURES, BATCH, ACCUMULATE = 24, 32, 4
to_point, to_pose, to_rig = (torch.randn(FEATURES, 3) / FEATURES**0.5 for _ in range(3))


def frames(n):
    x = torch.randn(n, TOKENS, FEATURES)
    target = {"points": 20 * torch.tanh(x @ to_point), "pose_rays": x @ to_pose, "rig_rays": x @ to_rig}
    return x, target


model, criterion = RigNet(FEATURES), MultiTaskLoss()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(30):
    opt.zero_grad()
    for _ in range(ACCUMULATE):
        images, target = frames(BATCH // ACCUMULATE)
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(images)
        points, pose, rig, total = criterion(out, target)
        (total / ACCUMULATE).backward()
    opt.step()
    print(f"step {step} points {points.item():.3f} ray loss {(pose + rig).item():.4f}")
