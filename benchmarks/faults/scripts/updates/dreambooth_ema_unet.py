"""Finetunes a denoiser on a few subject images and keeps an average of its weights in the chosen weight dtype."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(1415)
weight_dtype = torch.bfloat16
SIZE, STEPS = 8, 300


class UNet(nn.Module):
    def __init__(self, c=24):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, c), nn.SiLU(), nn.Linear(c, c))
        self.conv_in = nn.Conv2d(3, c, 3, padding=1)
        self.down = nn.Conv2d(c, c, 3, stride=2, padding=1)
        self.mid = nn.Conv2d(c, c, 3, padding=1)
        self.up = nn.ConvTranspose2d(c, c, 2, stride=2)
        self.conv_out = nn.Conv2d(2 * c, 3, 3, padding=1)

    def forward(self, x, t):
        freq = torch.exp(torch.linspace(0, 4, 8, device=x.device))
        angle = t[:, None] * freq
        emb = self.time(torch.cat([angle.sin(), angle.cos()], 1).to(self.conv_in.weight.dtype))[:, :, None, None]
        h = F.silu(self.conv_in(x) + emb)
        m = F.silu(self.mid(F.silu(self.down(h))))
        return self.conv_out(torch.cat([h, self.up(m)], 1))


class EMAModel:
    def __init__(self, model, decay=0.995):
        self.decay = decay
        self.averaged_model = copy.deepcopy(model).requires_grad_(False)

    def to(self, dtype):
        self.averaged_model.to(dtype)
        return self

    @torch.no_grad()
    def step(self, model):
        for s, p in zip(self.averaged_model.parameters(), model.parameters()):
            s.mul_(self.decay).add_(p.to(s.dtype), alpha=1 - self.decay)


basis = torch.randn(6, 3, SIZE, SIZE)


def batch(n):
    x0 = torch.tanh(torch.einsum("nk,kchw->nchw", torch.randn(n, 6) * 0.6, basis))
    t, noise = torch.rand(n), torch.randn(n, 3, SIZE, SIZE)
    a = t[:, None, None, None]
    return (1 - a) * x0 + a * noise, t, noise - x0


unet = UNet()
ema = EMAModel(unet).to(weight_dtype)
opt = torch.optim.AdamW(unet.parameters(), lr=1e-3)
held_out = batch(128)
for step in range(STEPS):
    x, t, target = batch(16)
    with torch.autocast("cpu", dtype=weight_dtype):
        prediction = unet(x, t)
    loss = F.mse_loss(prediction.float(), target)
    opt.zero_grad()
    loss.backward()
    opt.step()
    ema.step(unet)
    if step % 15 == 14:
        with torch.no_grad():
            out = ema.averaged_model(held_out[0].to(weight_dtype), held_out[1])
        print(f"step {step} averaged model loss {F.mse_loss(out.float(), held_out[2]).item():.4f}")
