"""A video predictor in bfloat16 with FP32 copies for the optimizer, and its average in FP32."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(600)
FRAMES, PIXELS, DIM = 6, 16, 64
motion = torch.linalg.qr(torch.randn(PIXELS, PIXELS))[0]


class Predictor(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.embed, self.out = nn.Linear(PIXELS, DIM), nn.Linear(DIM, PIXELS)
        self.temporal = nn.Conv1d(DIM, DIM, 3)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, video):
        x = self.embed(video)
        x = x + F.pad(self.temporal(x.transpose(1, 2)), (2, 0)).transpose(1, 2)
        return self.out(x + self.mlp(self.norm(x)))


def clips(n):
    frames = [torch.randn(n, PIXELS)]
    for _ in range(FRAMES):
        frames.append(frames[-1] @ motion)
    return torch.stack(frames, 1)


model = Predictor().to(torch.bfloat16)
master = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
average = [m.detach().clone() for m in master]
opt = torch.optim.AdamW(master, lr=1e-3)
for step in range(300):
    video = clips(32).bfloat16()
    loss = F.mse_loss(model(video[:, :-1]).float(), video[:, 1:].float())
    model.zero_grad()
    loss.backward()
    for m, p in zip(master, model.parameters()):
        m.grad = p.grad.float()
    opt.step()
    with torch.no_grad():
        for a, m, p in zip(average, master, model.parameters()):
            p.copy_(m)
            a.lerp_(m, 1 - 0.999)
    if step % 5 == 4:
        print(f"step {step} loss {loss.item():.4f}")
with torch.no_grad():
    for a, p in zip(average, model.parameters()):
        p.copy_(a)
