"""Phonemes and speakers from one encoder: two losses, accumulated; a GradScaler at its default scale in FP16."""

import torch
import torch.nn.functional as F
from torch import nn


class ConvBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.depth = nn.Conv1d(d, d, 5, padding=2, groups=d)
        self.point = nn.Linear(d, d)

    def forward(self, x):
        h = self.depth(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.point(F.silu(h))


class TwoHeads(nn.Module):
    def __init__(self, mels=16, d=32, phonemes=12, speakers=6):
        super().__init__()
        self.front = nn.Linear(mels, d)
        self.blocks = nn.Sequential(*(ConvBlock(d) for _ in range(3)))
        self.phoneme = nn.Linear(d, phonemes)
        self.speaker = nn.Linear(d, speakers)

    def forward(self, x):
        h = self.blocks(self.front(x))
        return self.phoneme(h), self.speaker(h.mean(1))


class Trainer:
    def __init__(self, model, accumulate=2):
        self.model, self.accumulate = model, accumulate
        decay = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim <= 1]
        self.optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.05}, {"params": rest}], lr=2e-3)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, 1.0, 8)
        self.scaler = torch.amp.GradScaler("cpu")
        self.norms = []

    def micro(self, x, phoneme, speaker):
        with torch.autocast("cpu", dtype=torch.float16):
            p, s = self.model(x)
        a = F.cross_entropy(p.float().flatten(0, 1), phoneme.flatten(), reduction="sum") / 8
        b = F.cross_entropy(s.float(), speaker)
        self.scaler.scale((a + b) / self.accumulate).backward()
        return a.item(), b.item()

    def step(self, batches):
        losses = [self.micro(*b) for b in batches]
        self.scaler.unscale_(self.optimizer)
        self.norms.append(nn.utils.clip_grad_norm_(self.model.parameters(), 5.0).item())
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.scaler.get_scale() >= before:
            self.schedule.step()
        return losses


def utterances(n, length=30):
    phoneme = torch.randint(12, (n, length // 5)).repeat_interleave(5, 1)
    speaker = torch.randint(6, (n,))
    x = F.one_hot(phoneme, 16).float() * 2 + 0.3 * torch.randn(n, length, 16)
    x[..., 12:] += speaker[:, None, None] / 3
    return 6 * x, phoneme, speaker


torch.manual_seed(44)
trainer = Trainer(TwoHeads())
for step in range(24):
    losses = trainer.step([utterances(8) for _ in range(2)])
    if step % 4 == 0:
        print(f"step {step} losses {losses[0]} norm {trainer.norms[-1]} scale {trainer.scaler.get_scale()}")
