"""Finetunes a flower classifier on a new set of species: the last layer is replaced, the rest is kept."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from backbone import flowers, pretrained

SPECIES, EPOCHS, LR = 12, 12, 0.003

torch.manual_seed(36)
generator = torch.Generator().manual_seed(36)
model = pretrained(generator)
optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=1e-4)
model.fc = nn.Linear(model.fc.in_features, SPECIES)

train_x, train_y = flowers(1536, SPECIES, generator)
val_x, val_y = flowers(384, SPECIES, generator)
for epoch in range(EPOCHS):
    model.train()
    for idx in torch.randperm(len(train_x)).split(64):
        loss = F.cross_entropy(model(train_x[idx]), train_y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        out = model(val_x)
        acc = (out.argmax(1) == val_y).float().mean().item()
    print(f"epoch {epoch} val loss {F.cross_entropy(out, val_y).item():.4f} acc {acc:.3f}")
