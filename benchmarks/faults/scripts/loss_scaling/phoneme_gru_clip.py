"""Frame-wise phonemes with a bidirectional GRU, float16 autocast, SGD with momentum."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(8)
PHONES, MEL, FRAMES = 9, 24, 30
prototypes = torch.randn(PHONES, MEL)


def utterances(n):
    change = torch.rand(n, FRAMES) < 0.2
    label = torch.randint(PHONES, (n, FRAMES))
    for t in range(1, FRAMES):
        label[:, t] = torch.where(change[:, t], label[:, t], label[:, t - 1])
    return prototypes[label] + 1.3 * torch.randn(n, FRAMES, MEL), label


class Tagger(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.front = nn.Conv1d(MEL, hidden, 3, padding=1)
        self.norm = nn.LayerNorm(hidden)
        self.gru = nn.GRU(hidden, hidden, batch_first=True, bidirectional=True)
        self.proj = nn.Linear(2 * hidden, PHONES)

    def forward(self, x):
        x = F.gelu(self.front(x.mT)).mT
        x, _ = self.gru(self.norm(x).float())
        return self.proj(x)


def main(steps=120, lr=0.15, max_norm=1.0):
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.5 * (1 + math.cos(math.pi * s / steps)))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    for step in range(steps):
        x, y = utterances(16)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(x)
        loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        if step % 3 == 0:
            print(f"[{step:03d}] loss={loss.item():.4f} scale={scaler.get_scale():.0f}")


main()
