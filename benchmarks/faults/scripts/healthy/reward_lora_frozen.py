"""Reward-weighted finetuning: the frozen denoiser is held in half precision, its adapters in FP32."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(8)
LATENT, DIM, RANK, PROMPTS = 16, 64, 4, 12
inference_dtype = torch.bfloat16
prompt_means = torch.randn(PROMPTS, LATENT)
favour = torch.randn(LATENT) / LATENT**0.5


class LoRALinear(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.normal_(self.down.weight, std=1 / RANK)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x.to(self.base.weight.dtype)).to(x.dtype) + self.up(self.down(x))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.prompts = nn.Embedding(PROMPTS, DIM)
        self.x_in, self.t_in = nn.Linear(LATENT, DIM), nn.Linear(1, DIM)
        self.fc1, self.fc2 = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.out = nn.Linear(DIM, LATENT)

    def forward(self, x, t, prompt):
        dtype = self.x_in.weight.dtype
        h = (self.x_in(x.to(dtype)) + self.t_in(t.to(dtype)) + self.prompts(prompt)).to(x.dtype)
        h = h + F.silu(self.fc2(F.silu(self.fc1(h)))).to(x.dtype)
        return self.out(h.to(dtype)).to(x.dtype)


def batch(n):
    prompt = torch.randint(PROMPTS, (n,))
    x0 = prompt_means[prompt] + 0.5 * torch.randn(n, LATENT)
    t, noise = torch.rand(n, 1), torch.randn(n, LATENT)
    return x0, (1 - t) * x0 + t * noise, t, prompt, noise


model = Denoiser()
pretrain = torch.optim.Adam(model.parameters(), lr=2e-3)
for _ in range(150):
    _, x, t, prompt, noise = batch(64)
    pretrain.zero_grad()
    F.mse_loss(model(x, t, prompt), noise).backward()
    pretrain.step()

model.requires_grad_(False).to(inference_dtype)
model.fc1, model.fc2 = LoRALinear(model.fc1), LoRALinear(model.fc2)
opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, weight_decay=1e-4)
shift = 1.5 * torch.randn(PROMPTS, LATENT)
for step in range(200):
    x0, x, t, prompt, noise = batch(64)
    moved = x + (1 - t) * shift[prompt]
    reward = torch.sigmoid(x0 @ favour)
    error = (model(moved, t, prompt) - noise).square().mean(1)
    loss = (reward * error).sum() / reward.sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 5 == 4:
        print(f"step {step} loss {loss.item():.4f}")
