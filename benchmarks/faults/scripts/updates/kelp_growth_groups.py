"""Growth of kelp from water data and image texture: two groups of parameters, each with its own decay."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(63)
STEPS, PER_EPOCH, SPRING = 600, 50, 300
water_map, texture_map = torch.randn(7), torch.randn(2, 12)


def plots(n, spring):
    water, texture = torch.randn(n, 7), torch.randn(n, 12)
    a, b = (texture @ texture_map.T / 2).unbind(1)
    return water, texture, torch.tanh(water @ water_map / 2) + torch.sin(b if spring else a)


class Texture(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        return self.c(F.gelu(self.b(F.gelu(self.a(x)))))


class Growth(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.water = nn.Sequential(nn.Linear(7, d), nn.GELU(), nn.Linear(d, d))
        self.texture = Texture(d)
        self.norm = nn.LayerNorm(2 * d)
        self.joint = nn.Sequential(nn.Linear(2 * d, d), nn.GELU(), nn.Linear(d, d), nn.GELU())
        self.out = nn.Linear(d, 1)

    def forward(self, water, texture):
        return self.out(self.joint(self.norm(torch.cat([self.water(water), self.texture(texture)], 1)))).squeeze(1)


model = Growth()
texture = list(model.texture.parameters())
others = [p for n, p in model.named_parameters() if not n.startswith("texture.")]
optimizer = torch.optim.Adam([{"params": others}, {"params": texture}], lr=3e-3)
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, [lambda step: 0.95 ** (step // PER_EPOCH), lambda step: 0.97**step]
)
for step in range(STEPS):
    water, image, growth = plots(96, step >= SPRING)
    loss = F.mse_loss(model(water, image), growth)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 20 == 19:
        print(f"step {step} loss {loss.item():.4f}")
