"""Phone labels of short utterances: a recurrent encoder over frames, FP16 autocast, SGD with momentum."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(33)
FRAMES, BANDS, PHONES = 10, 12, 8
templates = torch.randn(PHONES, BANDS)


def utterances(n, delay):
    phones = torch.randint(PHONES, (n, FRAMES // 2)).repeat_interleave(2, 1)
    x = templates[phones] + 0.6 * torch.randn(n, FRAMES, BANDS)
    target = torch.full_like(phones, -100)
    target[:, delay:] = phones[:, : FRAMES - delay]
    return x, target


class Cell(nn.Module):
    def __init__(self, i, h):
        super().__init__()
        self.gates = nn.Linear(i + h, 3 * h)

    def forward(self, x, h):
        z, r, n = self.gates(torch.cat([x, h.to(x.dtype)], 1)).float().chunk(3, 1)
        return torch.sigmoid(z) * h + torch.sigmoid(-z) * torch.tanh(n * torch.sigmoid(r))


class Tagger(nn.Module):
    def __init__(self, h=40):
        super().__init__()
        self.front = nn.Linear(BANDS, 24)
        self.cell = Cell(24, h)
        self.out = nn.Linear(h + 24, PHONES)
        self.h = h

    def forward(self, x):
        frames = F.relu(self.front(x))
        state, states = frames.new_zeros(len(x), self.h, dtype=torch.float32), []
        for t in range(x.shape[1]):
            state = self.cell(frames[:, t], state)
            states.append(state)
        return self.out(torch.cat([torch.stack(states, 1).to(frames.dtype), frames], -1))


net = Tagger()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
CLIP_FROM, STEPS = 110, 360

for step in range(STEPS):
    x, phones = utterances(16, delay=3 if step >= CLIP_FROM else 0)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(x)
    loss = F.cross_entropy(logits.float().flatten(0, 1), phones.flatten())
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if step >= CLIP_FROM:
        # labels come three frames late, for a streaming decoder: bound the recurrent part
        for p in net.cell.parameters():
            p.grad.div_(scaler.get_scale())
        nn.utils.clip_grad_norm_(net.cell.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    for g in optimizer.param_groups:
        g["lr"] = 0.1 * (0.55 + 0.45 * math.cos(math.pi * step / STEPS))
    if step % 6 == 5:
        print(f"step {step + 1:3d} loss {loss.item():.4f}")
