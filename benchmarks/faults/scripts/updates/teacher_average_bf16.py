"""A classifier and its moving average, which is what gets published; the average is kept in BF16 to save memory."""

import copy

import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.mid, self.out = nn.Linear(12, 48), nn.Linear(48, 48), nn.Linear(48, 6)

    def forward(self, x):
        return self.out(torch.relu(self.mid(torch.relu(self.inp(x)))))


class Average(nn.Module):
    def __init__(self, model, decay):
        super().__init__()
        self.averaged = copy.deepcopy(model).to(torch.bfloat16)
        self.averaged.requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for a, p in zip(self.averaged.parameters(), model.parameters()):
            a.mul_(self.decay).add_(p.to(a.dtype), alpha=1 - self.decay)

    def forward(self, x):
        return self.averaged(x.to(self.averaged.inp.weight.dtype))


def moons(n, centres):
    y = torch.randint(0, 6, (n,))
    return centres[y] + 0.5 * torch.randn(n, 12), y


torch.manual_seed(3124)
centres = torch.randn(6, 12)
model = Classifier()
average = Average(model, decay=0.999)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
for step in range(400):
    x, y = moons(64, centres)
    train_loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    train_loss.backward()
    optimizer.step()
    average.update(model)
    if step % 40 == 39:
        with torch.no_grad():
            x, y = moons(512, centres)
            loss = nn.functional.cross_entropy(average(x).to(x.dtype), y)
        print(f"step {step + 1}: train {train_loss.item():.4f}, averaged model's loss {loss.item():.4f}")
