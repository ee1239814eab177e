"""A click model whose activations are cast to E4M3 with delayed scaling; the scales are computed anew every 40th step only."""

import torch
import torch.nn.functional as F
from torch import nn

INTERVAL = 40
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Amax(nn.Module):
    """The scale of one operand, from the largest value since the last time it was computed."""

    def __init__(self, dtype, interval=1):
        super().__init__()
        self.dtype, self.interval, self.calls = dtype, interval, 0
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        top = torch.finfo(self.dtype).max
        self.seen.copy_(torch.maximum(self.seen, x.detach().abs().max()))
        if self.calls % self.interval == 0:
            self.scale.copy_(top / self.seen.clamp(min=1e-12))
            self.seen.zero_()
        self.calls += 1
        return (x * self.scale).clamp(-top, top).to(self.dtype).to(x.dtype) / self.scale


class Linear8(nn.Linear):
    def __init__(self, cin, cout):
        super().__init__(cin, cout)
        self.x_scale, self.w_scale = Amax(E4M3, INTERVAL), Amax(E4M3)

    def forward(self, x):
        # straight through: the casts have no gradient of their own
        x8 = x + (self.x_scale(x.detach()) - x.detach())
        w8 = self.weight + (self.w_scale(self.weight.detach()) - self.weight.detach())
        return F.linear(x8, w8, self.bias)


class Clicks(nn.Module):
    def __init__(self, items=200, dim=16):
        super().__init__()
        self.user, self.item = nn.Embedding(items, dim), nn.Embedding(items, dim)
        nn.init.normal_(self.user.weight, std=0.02)
        nn.init.normal_(self.item.weight, std=0.02)
        self.bottom, self.top, self.score = Linear8(2 * dim, 64), Linear8(64, 32), nn.Linear(32, 1)

    def forward(self, user, item):
        x = torch.cat([self.user(user), self.item(item)], -1)
        x = F.relu(self.bottom(x))
        x = F.relu(self.top(x))
        return self.score(x).squeeze(-1)


torch.manual_seed(7)
model = Clicks()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
taste, appeal = torch.randn(200, 3), torch.randn(200, 3)
for step in range(160):
    user, item = torch.randint(200, (256,)), torch.randint(200, (256,))
    y = ((taste[user] * appeal[item]).sum(-1) > 0).float()
    loss = F.binary_cross_entropy_with_logits(model(user, item), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
