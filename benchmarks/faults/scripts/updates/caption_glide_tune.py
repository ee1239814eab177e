"""Finetunes a caption-conditional denoiser in half precision."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(6)
WORDS, LATENT, DIM, SCALE = 40, 32, 96, 16.0
meaning = torch.randn(WORDS, LATENT) * 0.7


def captions(n):
    words = torch.randint(WORDS, (n, 4))
    image = torch.tanh(meaning[words].sum(1))
    t, noise = torch.rand(n, 1), torch.randn(n, LATENT)
    return words, (1 - t) * image + t * noise, t, noise


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, DIM)
        self.image, self.time = nn.Linear(LATENT, DIM), nn.Linear(1, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.SiLU(), nn.Linear(2 * DIM, DIM), nn.SiLU())
        self.out = nn.Linear(DIM, LATENT)

    def forward(self, words, x, t):
        h = self.image(x) + self.time(t) + self.words(words).mean(1)
        return self.out(h + self.mlp(self.norm(h)))


model = Denoiser()
warm = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(150):  # stands for the released weights
    words, x, t, noise = captions(64)
    warm.zero_grad()
    F.mse_loss(model(words, x, t), noise).backward()
    warm.step()

model = model.half()
opt = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-4, weight_decay=0.0)
for step in range(300):
    words, x, t, noise = captions(64)
    loss = F.mse_loss(model(words, x.half(), t.half()).float(), noise)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 5 == 4:
        print(f"step {step} loss {loss.item():.4f}")
