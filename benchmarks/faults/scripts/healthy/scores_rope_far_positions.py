"""Rotary attention in BF16 autocast at positions around 100 000; angles, sines and cosines are taken in FP64."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(615)
DIM, NOTES = 48, 12


class RotaryAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(DIM, DIM) for _ in range(4))
        self.register_buffer("inv_freq", 10000.0 ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM))

    def rotate(self, x, position):
        angle = position.double()[..., None] * self.inv_freq
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(self, x, position):
        q, k = self.rotate(self.q_proj(x), position), self.rotate(self.k_proj(x), position)
        return self.o_proj(
            F.scaled_dot_product_attention(q[:, None], k[:, None], self.v_proj(x)[:, None], is_causal=True)[:, 0]
        )


class Follower(nn.Module):
    def __init__(self):
        super().__init__()
        self.note, self.norm, self.attn, self.head = (
            nn.Embedding(NOTES, DIM),
            nn.LayerNorm(DIM),
            RotaryAttention(),
            nn.Linear(DIM, NOTES),
        )

    def forward(self, notes, position):
        x = self.note(notes)
        return self.head(x + self.attn(self.norm(x), position))


model = Follower()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for step in range(300):
    notes = torch.randint(NOTES, (32, 16))
    position = 100_000 + torch.randint(5000, (32, 1)) + torch.arange(16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(notes, position)
    loss = F.cross_entropy(logits[:, 1:].float().flatten(0, 1), notes[:, :-1].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 15 == 14:
        print(f"step {step + 1} loss {loss.item():.4f}")
