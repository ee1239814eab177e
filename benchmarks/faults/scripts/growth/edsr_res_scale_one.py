"""A denoiser of 16 residual blocks without batch norm, MSRA initialisation, and res_scale left at 1."""

import argparse
import math

import torch
import torch.nn as nn

parser = argparse.ArgumentParser(description="EDSR for denoising")
parser.add_argument("--n_resblocks", type=int, default=16)
parser.add_argument("--n_feats", type=int, default=12)
parser.add_argument("--res_scale", type=float, default=1.0)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--iterations", type=int, default=100)
args = parser.parse_args()


def default_conv(c_in, c_out, kernel_size):
    return nn.Conv2d(c_in, c_out, kernel_size, padding=kernel_size // 2)


class ResBlock(nn.Module):
    def __init__(self, n_feats, res_scale):
        super().__init__()
        self.body = nn.Sequential(default_conv(n_feats, n_feats, 3), nn.ReLU(True), default_conv(n_feats, n_feats, 3))
        self.res_scale = res_scale

    def forward(self, x):
        return x + self.body(x).mul(self.res_scale)


class EDSR(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.head = default_conv(1, args.n_feats, 3)
        self.body = nn.Sequential(*[ResBlock(args.n_feats, args.res_scale) for _ in range(args.n_resblocks)])
        self.tail = default_conv(args.n_feats, 1, 3)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight)
                nn.init.zeros_(m.bias)

    def forward(self, x):
        x = self.head(x)
        return self.tail(self.body(x) + x)


def textures(n, size=16):
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    phase, angle = 2 * math.pi * torch.rand(2, n, 1, 1)
    clean = torch.sin(0.8 * (x * torch.cos(angle) + y * torch.sin(angle)) + phase).unsqueeze(1)
    return clean + 0.3 * torch.randn_like(clean), clean


torch.manual_seed(614)
model = EDSR(args)
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.9, 0.999), eps=1e-8)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, gamma=0.5)
log = 0.0
for batch in range(1, args.iterations + 1):
    noisy, clean = textures(8)
    optimizer.zero_grad()
    loss = nn.functional.l1_loss(model(noisy), clean)
    loss.backward()
    optimizer.step()
    scheduler.step()
    log += loss.item()
    if batch % 4 == 0:
        print(f"[{batch}/{args.iterations}]\t[L1 loss: {log / 4:.4f}]")
        log = 0.0
