"""Tasting notes -> grape. SGD with weight decay for every parameter, one-cycle schedule."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(83)
WORDS, GRAPES, LENGTH = 150, 9, 20
affinity = torch.randn(GRAPES, WORDS)


def notes(n):
    y = torch.randint(GRAPES, (n,))
    ids = torch.multinomial((1.2 * affinity[y]).softmax(-1), LENGTH, replacement=True)
    return ids, y


class Sommelier(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.words = nn.Embedding(WORDS, d)
        self.norm = nn.LayerNorm(d)
        self.fc1 = nn.Linear(d, 2 * d)
        self.fc2 = nn.Linear(2 * d, GRAPES)

    def forward(self, ids):
        h = self.norm(self.words(ids).mean(1))
        return self.fc2(F.relu(self.fc1(h)))


model = Sommelier()
steps = 150
opt = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=5e-2)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.5, total_steps=steps)
for i in range(steps):
    ids, y = notes(64)
    loss = F.cross_entropy(model(ids), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    sched.step()
    if i % 5 == 0:
        print(f"[{i}/{steps}] loss {loss.item():.4f}")
