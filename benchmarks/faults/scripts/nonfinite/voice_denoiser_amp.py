"""Spectrogram denoiser with mixed precision; autocast and GradScaler were added to an older training loop."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.amp import GradScaler, autocast


class ResBlock(nn.Module):
    def __init__(self, channels, dilation):
        super().__init__()
        self.conv1 = nn.Conv1d(channels, channels, 3, padding=dilation, dilation=dilation)
        self.conv2 = nn.Conv1d(channels, channels, 3, padding=1)

    def forward(self, x):
        return x + self.conv2(F.leaky_relu(self.conv1(F.leaky_relu(x, 0.1)), 0.1))


class Synthesizer(nn.Module):
    def __init__(self, mels=20, channels=32):
        super().__init__()
        self.conv_pre = nn.Conv1d(mels, channels, 7, padding=3)
        self.resblocks = nn.ModuleList([ResBlock(channels, d) for d in (1, 3, 5)])
        self.conv_post = nn.Conv1d(channels, mels, 7, padding=3)

    def forward(self, x):
        x = self.conv_pre(x)
        for block in self.resblocks:
            x = block(x)
        return self.conv_post(F.leaky_relu(x))


class HParams:
    learning_rate = 2e-3
    betas = (0.8, 0.99)
    c_mel = 45
    fp16_run = True
    log_interval = 5


def get_batch(hps, n=8, frames=40):
    t = torch.arange(frames) / 6
    clean = torch.sin(t[None, None] + torch.rand(n, 20, 1) * 6) * torch.rand(n, 1, 1) * 2
    return clean + 0.3 * torch.randn_like(clean), clean


def train_and_evaluate(hps, net_g, optim_g, scheduler, scaler, epochs=30):
    net_g.train()
    for batch_idx in range(epochs):
        noisy, clean = get_batch(hps)
        with autocast("cpu", dtype=torch.float16, enabled=hps.fp16_run):
            y_hat = net_g(noisy)
        with autocast("cpu", enabled=False):
            loss_mel = F.l1_loss(y_hat.float(), clean) * hps.c_mel
            loss_energy = F.mse_loss(y_hat.float().pow(2).sum(1), clean.pow(2).sum(1))
            loss_gen_all = loss_mel + loss_energy
        optim_g.zero_grad()
        scaler.scale(loss_gen_all).backward()
        scaler.unscale_(optim_g)
        grad_norm_g = nn.utils.clip_grad_norm_(net_g.parameters(), 1000.0)
        scaler.step(optim_g)
        optim_g.step()
        scaler.update()
        scheduler.step()
        if batch_idx % hps.log_interval == 0:
            print(f"[{batch_idx}] mel {loss_mel.item():.3f} energy {loss_energy.item():.3f} norm {grad_norm_g:.1f}")


def main():
    torch.manual_seed(1234)
    hps = HParams()
    net_g = Synthesizer()
    optim_g = torch.optim.AdamW(net_g.parameters(), hps.learning_rate, betas=hps.betas, eps=1e-9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optim_g, gamma=0.999)
    scaler = GradScaler("cpu", enabled=hps.fp16_run)
    train_and_evaluate(hps, net_g, optim_g, scheduler, scaler)


if __name__ == "__main__":
    main()
