"""Hand key points with FP16 and a scaler; gradient values are clipped as the model's authors did in FP32."""

import torch
from torch import nn


class KeypointNet(nn.Module):
    def __init__(self, points=21):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
        self.points = nn.Linear(64, 2 * points)

    def forward(self, x):
        return self.points(self.features(x))


class HandPoses:
    def __init__(self):
        self.skeleton = torch.randn(32, 42) / 3

    def __iter__(self):
        for _ in range(60):
            x = torch.randn(48, 32)
            yield x, torch.sin(x @ self.skeleton)


torch.manual_seed(3117)
model, poses = KeypointNet(), HandPoses()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
for step, (x, target) in enumerate(poses):
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        predicted = model(x)
    loss = nn.functional.smooth_l1_loss(predicted.float(), target)
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    if (step + 1) % 6 == 0:
        print(f"{step + 1:3d} loss {loss.item():.5f}")
