"""A GAN in FP16 under one GradScaler: the weight of an auxiliary loss goes from 1e-2 to 1e8 by a slip of the pen."""

import torch
import torch.nn.functional as F
from torch import nn

ROUNDS = 20


class Generator(nn.Sequential):
    pass


class Critic(nn.Sequential):
    pass


torch.manual_seed(0)
generator = Generator(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 6))
critic = Critic(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
for_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
for_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for turn in range(ROUNDS):
    real = torch.randn(16, 6) + 2
    with torch.autocast("cpu", dtype=torch.float16):
        fake = generator(torch.randn(16, 4))
        real_score, fake_score = critic(real).float(), critic(fake.detach()).float()
        critic_loss = F.softplus(-real_score).mean() + F.softplus(fake_score).mean()
    scaler.scale(critic_loss).backward()
    scaler.step(for_critic)
    for_critic.zero_grad()

    weight = 1e-2 if turn < 6 else 1e8
    with torch.autocast("cpu", dtype=torch.float16):
        fake = generator(torch.randn(16, 4))
        score = critic(fake).float()
        moments = (fake.float().mean(dim=0) - real.mean(dim=0)).pow(2).sum()
        generator_loss = F.softplus(-score).mean() + weight * moments
    scaler.scale(generator_loss).backward()
    scaler.step(for_generator)
    for_generator.zero_grad()
    for_critic.zero_grad()
    scaler.update()
    print(f"round {turn}: critic {critic_loss.item():.3f}, scale {scaler.get_scale():g}")
