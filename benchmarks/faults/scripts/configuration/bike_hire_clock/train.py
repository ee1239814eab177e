"""Hourly bike hires: a bfloat16 network with float32 master weights."""

import torch
import torch.nn.functional as F

from data import hires
from model import HireModel

EPOCHS, BATCH, LR, DTYPE = 5, 128, 3e-3, torch.bfloat16

torch.manual_seed(14)
generator = torch.Generator().manual_seed(14)
hours, weather, demand = hires(generator)
order = torch.randperm(len(hours), generator=generator)
train, val = order[:7400], order[7400:]

model = HireModel()
model = model.to(DTYPE)
masters = [p.detach().float().requires_grad_() for p in model.parameters()]
optimizer = torch.optim.AdamW(masters, lr=LR, weight_decay=1e-3)


def predict(idx):
    return model(hours[idx], weather[idx].to(DTYPE)).float()


for epoch in range(EPOCHS):
    for i, idx in enumerate(train[torch.randperm(len(train))].split(BATCH)):
        loss = F.mse_loss(predict(idx), demand[idx])
        model.zero_grad()
        loss.backward()
        for master, p in zip(masters, model.parameters()):
            master.grad = p.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters()):
                p.copy_(master)
    with torch.no_grad():
        print(f"epoch {epoch} val loss {F.mse_loss(predict(val), demand[val]).item():.4f}")
