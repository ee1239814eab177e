"""GAN for lip contours: one GradScaler, two optimizers, a common clip."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def mlp(*sizes):
    layers = []
    for a, b in zip(sizes[:-1], sizes[1:]):
        layers += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


class LipGAN(nn.Module):
    def __init__(self, audio=16, points=24):
        super().__init__()
        self.generator = mlp(audio, 64, points)
        self.discriminator = mlp(audio + points, 64, 1)

    def forward(self, audio):
        return self.generator(audio)

    def judge(self, audio, lips):
        return self.discriminator(torch.cat([audio, lips], 1))


torch.manual_seed(23)
W = torch.randn(16, 24) / 4
gan = LipGAN()
opt_g = torch.optim.Adam(gan.generator.parameters(), lr=1e-3)
opt_d = torch.optim.SGD(gan.discriminator.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=8192.0)

for step in range(200):
    audio = torch.randn(64, 16)
    lips = torch.tanh(audio @ W)
    opt_g.zero_grad()
    opt_d.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        fake = gan(audio)
        real_score, fake_score = gan.judge(audio, lips), gan.judge(audio, fake.detach() + torch.randn(64, 24))
        d_loss = F.softplus(-real_score.float()).mean() + F.softplus(fake_score.float()).mean()
        g_loss = F.l1_loss(fake.float(), lips)
    scaler.scale(d_loss).backward()
    scaler.scale(g_loss).backward()
    scaler.unscale_(opt_g)
    torch.nn.utils.clip_grad_norm_(gan.parameters(), max_norm=1.0)
    scaler.step(opt_g)
    scaler.step(opt_d)
    scaler.update()
    if step % 10 == 0:
        print(f"step {step} g {g_loss.item():.4f} d_loss {d_loss.item():.4f}")
