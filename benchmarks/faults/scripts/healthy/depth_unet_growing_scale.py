# monocular depth, float16 autocast; a short growth interval, so the scaler tries a larger scale often
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(205)


def scenes(n, s=16):
    g = torch.linspace(-1, 1, s)
    slope, height = torch.randn(2, n, 1, 1)
    depth = (1.5 + 0.4 * slope * g.view(1, -1, 1) + 0.3 * height * g.view(1, 1, -1)).clamp(0.4)
    shade = torch.stack([1 / depth, torch.sin(8 / depth), depth], 1)
    return shade + 0.1 * torch.randn(n, 3, s, s), depth


class DepthNet(nn.Module):
    def __init__(self, c=12):
        super().__init__()
        self.enc1 = nn.Sequential(nn.Conv2d(3, c, 3, padding=1), nn.GroupNorm(3, c), nn.SiLU())
        self.enc2 = nn.Sequential(nn.Conv2d(c, 2 * c, 3, 2, 1), nn.GroupNorm(3, 2 * c), nn.SiLU())
        self.dec = nn.Sequential(nn.Conv2d(3 * c, c, 3, padding=1), nn.GroupNorm(3, c), nn.SiLU())
        self.out = nn.Conv2d(c, 1, 1)

    def forward(self, x):
        a = self.enc1(x)
        b = F.interpolate(self.enc2(a), scale_factor=2.0)
        return self.out(self.dec(torch.cat([a, b], 1))).squeeze(1)


def main():
    net = DepthNet()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=8)
    for step in range(110):
        x, depth = scenes(12)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            log_depth = net(x)
        gap = log_depth.float() - depth.log()
        loss = gap.square().mean() - 0.5 * gap.mean((1, 2)).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if step % 2 == 0:
            print(f"step {step} loss {loss.item():.5f} scale {scaler.get_scale():g}")


main()
