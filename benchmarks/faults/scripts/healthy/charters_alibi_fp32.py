"""A denoiser of long charters with ALiBi: distances of a thousand, biases of minus five hundred, in FP32."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class BiasedAttention(nn.Module):
    def __init__(self, dim, heads, length):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        position = torch.arange(length, dtype=torch.float32)
        slopes = 2.0 ** -torch.arange(1, heads + 1, dtype=torch.float32)
        distance = (position[None] - position[:, None]).abs()
        self.register_buffer("bias", -slopes[:, None, None] * distance)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)).to(self.bias.dtype) / (d / self.heads) ** 0.5 + self.bias
        y = scores.softmax(-1).to(v.dtype) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class Denoiser(nn.Module):
    def __init__(self, dim=24, length=512):
        super().__init__()
        self.inp, self.attend = nn.Linear(1, dim), BiasedAttention(dim, 4, length)
        self.norm, self.out = nn.LayerNorm(dim), nn.Linear(dim, 1)

    def forward(self, x):
        h = self.inp(x[..., None])
        return self.out(self.norm(h + self.attend(h))).squeeze(-1)


def strokes(n, length=512):
    clean = torch.randn(n, length // 8).repeat_interleave(8, 1)
    return clean + 0.8 * torch.randn(n, length), clean


torch.manual_seed(311)
model = Denoiser()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(80):
    noisy, clean = strokes(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(noisy)
    loss = F.mse_loss(out.float(), clean)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step} loss {loss.item():.4f}")
