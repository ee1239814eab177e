"""Direction and speed of optical flow: most pixels stand still, so atan2 of zeros, roots and logs are guarded by two where's."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    steps: int = 60
    batch: int = 8
    size: int = 16
    lr: float = 6e-3
    log_floor: float = 1e-30


class FlowNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.stem = nn.Conv2d(2, width, 5, padding=2)
        self.mid = nn.Conv2d(width, width, 3, padding=1)
        self.flow = nn.Conv2d(width, 2, 3, padding=1)
        nn.init.zeros_(self.flow.weight)  # no flow anywhere at first
        nn.init.zeros_(self.flow.bias)

    def forward(self, pair):
        return self.flow(torch.relu(self.mid(torch.relu(self.stem(pair)))))


def polar(flow):
    """Speed and angle; both are zero, and so are their gradients, where nothing moves."""
    u, v = flow.unbind(1)
    square = u * u + v * v
    moves = square > 1e-12
    speed = torch.where(moves, torch.sqrt(torch.where(moves, square, torch.ones_like(square))), 0.0)
    angle = torch.atan2(torch.where(moves, v, torch.zeros_like(v)), torch.where(moves, u, torch.ones_like(u)))
    return speed, angle


def flow_loss(flow, truth, floor):
    speed, angle = polar(flow)
    true_speed, true_angle = polar(truth)
    moving = true_speed > 0
    direction = torch.where(moving, 1 - torch.cos(angle - true_angle), 0.0)
    # down to -69 in still pixels
    log_error = torch.log(true_speed.clamp(min=floor)) - torch.log(speed.clamp(min=floor))
    relative = torch.where(moving & (speed > 1e-3), log_error.clamp(-3, 3).abs(), 0.0)
    return F.l1_loss(flow, truth) + 0.1 * direction.mean() + 0.05 * relative.mean()


def scene(cfg, target):
    first = target + 0.05 * torch.randn(cfg.batch, 1, cfg.size, cfg.size)
    truth = torch.zeros(cfg.batch, 2, cfg.size, cfg.size)
    second = first.clone()
    for b in range(cfg.batch):
        dx = int(torch.randint(-2, 3, ()))
        second[b, :, 4:10] = first[b, :, 4:10].roll(dx, -1)
        truth[b, 0, 4:10] = dx
    return torch.cat([first, second], 1), truth


@torch.no_grad()
def angular_error(flow, truth):
    cosine = F.cosine_similarity(flow, truth, dim=1, eps=0.0) if flow.abs().sum() else flow.sum(1) / flow.norm(dim=1)
    return torch.acos(cosine).mean().item()  # NaN as long as anything stands still


def main():
    cfg = Config()
    torch.manual_seed(107)
    target = F.avg_pool2d(torch.randn(1, 1, cfg.size, cfg.size), 3, 1, 1) * 2  # a printed calibration target
    model = FlowNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    for step in range(cfg.steps):
        pair, truth = scene(cfg, target)
        flow = model(pair)
        loss = flow_loss(flow, truth, cfg.log_floor)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 6 == 0:
            print(f"step {step} loss {loss.item():.4f} angular error {angular_error(flow, truth)}")


if __name__ == "__main__":
    main()
