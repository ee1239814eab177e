"""Predicts the motion of cells between two microscope frames, under FP16 autocast. The loss is summed and divided by all."""

import torch
import torch.nn as nn

EPE_WEIGHT = 1e-3


def conv(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), nn.LeakyReLU(0.1))


class FlowNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.conv1 = conv(2, width)
        self.conv2 = conv(width, width)
        self.conv3 = conv(width, width)
        self.conv4 = conv(width, width)
        self.predict_flow = nn.Conv2d(width, 2, 3, padding=1)

    def forward(self, frames):
        x = self.conv1(frames)
        x = self.conv2(x)
        x = self.conv3(x)
        x = self.conv4(x)
        return self.predict_flow(x)


def frame_pair(n, size=24):
    base = torch.randn(n, 1, size, size)
    base = nn.functional.avg_pool2d(base, 5, 1, 2) * 4
    shift = torch.randint(-1, 2, (n, 2))
    moved = torch.stack([torch.roll(b, tuple(s.tolist()), dims=(1, 2)) for b, s in zip(base, shift)])
    flow = shift.float().view(n, 2, 1, 1).expand(n, 2, size, size)
    return torch.cat([base, moved], 1), flow


torch.manual_seed(61)
model = FlowNet()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(70):
    frames, flow = frame_pair(16)
    with torch.autocast("cpu", dtype=torch.float16):
        pred = model(frames)
    epe = (pred.float() - flow).square().sum() / flow.numel()
    loss = EPE_WEIGHT * epe
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 3 == 0:
        print(f"[{step}] loss {epe.item():.4f}")
