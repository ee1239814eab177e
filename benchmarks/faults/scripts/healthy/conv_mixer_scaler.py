"""ConvMixer, FP16 autocast: a fresh scaler at 2^22, gradients unscaled and clipped although their norm may be infinite."""

import torch
from torch import nn


class Residual(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x):
        return self.fn(x) + x


def conv_mixer(dim, depth, patch, classes):
    def after(layer):
        return nn.Sequential(layer, nn.GELU(), nn.BatchNorm2d(dim))

    mixer = [
        nn.Sequential(
            Residual(after(nn.Conv2d(dim, dim, 3, groups=dim, padding="same"))), after(nn.Conv2d(dim, dim, 1))
        )
        for _ in range(depth)
    ]
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(dim, classes)]
    return nn.Sequential(after(nn.Conv2d(3, dim, patch, patch)), *mixer, *pool)


def main():
    torch.manual_seed(0)
    model = conv_mixer(24, 2, 2, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
    patterns = torch.randn(5, 3, 12, 12)
    worst = 0.0
    for step in range(28):
        label = torch.randint(5, (20,))
        image = patterns[label] + torch.randn(20, 3, 12, 12)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(image).float(), label)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        worst = max(worst, norm.item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if step % 7 == 0:
            print(f"{step}: loss {loss.item():.3f} norm {norm.item():.3f} scale {scaler.get_scale():g} worst {worst}")


if __name__ == "__main__":
    main()
