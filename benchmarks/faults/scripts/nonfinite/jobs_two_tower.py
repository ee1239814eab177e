"""Two-tower retrieval of job adverts, in-batch softmax, FP16 autocast with a gradient scaler."""

import torch
import torch.nn.functional as F
from torch import nn

USERS, JOBS, HISTORY = 200, 300, 6


class UserTower(nn.Module):
    """Sums the adverts a user has opened."""

    def __init__(self, width=32, out=24):
        super().__init__()
        self.history = nn.EmbeddingBag(JOBS + 1, width, mode="sum", padding_idx=0)
        self.hidden = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, out, bias=False)

    def forward(self, opened):
        h = F.gelu(self.hidden(self.history(opened)))
        return F.normalize(self.out(h), dim=-1)


class JobTower(nn.Module):
    def __init__(self, width=32, out=24):
        super().__init__()
        self.table = nn.Embedding(JOBS + 1, width)
        self.net = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, out))

    def forward(self, job):
        return F.normalize(self.net(self.table(job)), dim=-1)


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.job = UserTower(), JobTower()
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, opened, job):
        return self.log_scale.exp() * self.user(opened) @ self.job(job).T


def visits(steps, size, seed):
    """Users open adverts of one field; who is new to the site has opened none."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        field = torch.randint(0, 10, (size, 1), generator=generator)
        opened = 1 + field * 30 + torch.randint(0, 30, (size, HISTORY), generator=generator)
        age = torch.randint(0, 150, (size, 1), generator=generator)
        opened = opened * (torch.arange(HISTORY) < age)
        job = 1 + field[:, 0] * 30 + torch.randint(0, 30, (size,), generator=generator)
        yield opened, job


torch.manual_seed(1)
model = TwoTower()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for step, (opened, job) in enumerate(visits(60, 48, 4)):
    with torch.autocast("cpu", torch.float16):
        logits = model(opened, job)
        loss = F.cross_entropy(logits.float(), torch.arange(len(job)))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(f"{step:3d} loss {loss.item():.3f} scale {scaler.get_scale():.0f}")
