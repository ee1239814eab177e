"""Keyword spotting on synthetic spectrograms: depthwise convolutions over time, FP16 autocast, momentum SGD."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(31)
N_MELS, FRAMES, WORDS = 20, 32, 8
CENTRES = torch.rand(WORDS, 2) * 0.8 + 0.1
SLOPES = torch.linspace(-0.6, 0.6, WORDS)


def utterances(n):
    word = torch.randint(WORDS, (n,))
    t = torch.linspace(0, 1, FRAMES)
    f = torch.linspace(0, 1, N_MELS)
    ridge = CENTRES[word, 0, None] + SLOPES[word, None] * (t - 0.5) + 0.03 * torch.randn(n, 1)
    mel = torch.exp(-((f[None, :, None] - ridge[:, None, :]) ** 2) / 0.01)
    return mel + 0.3 * torch.randn(n, N_MELS, FRAMES), word


class DSBlock(nn.Module):
    def __init__(self, c, k=5):
        super().__init__()
        self.depth = nn.Conv1d(c, c, k, padding=k // 2, groups=c)
        self.point = nn.Conv1d(c, c, 1)
        self.norm = nn.GroupNorm(1, c)

    def forward(self, x):
        return x + F.relu(self.norm(self.point(self.depth(x))))


class DSCNN(nn.Module):
    def __init__(self, c=48):
        super().__init__()
        self.stem = nn.Conv1d(N_MELS, c, 3, padding=1)
        self.blocks = nn.Sequential(DSBlock(c), DSBlock(c))
        self.fc = nn.Linear(c, WORDS)

    def forward(self, mel):
        return self.fc(self.blocks(self.stem(mel)).mean(-1))


net = DSCNN()
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: 0.5 * (1 + math.cos(math.pi * i / 120)))
scaler = torch.amp.GradScaler("cpu", init_scale=128.0)

for step in range(120):
    mel, word = utterances(32)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(net(mel).float(), word)
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 2.0)
    scaler.step(opt)
    scaler.update()
    sched.step()
    if step % 5 == 0 or step > 100:
        print(f"step {step:3d} loss {loss.item():.4f}")
