"""Linear probe on a pretrained glyph encoder: the encoder stays as it is, in eval mode."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from encoder import glyphs, pretrain

CLASSES, EPOCHS, BATCH, LR = 16, 8, 64, 2e-3


class Probe(nn.Module):
    def __init__(self, encoder, classes):
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.dim, classes)
        for p in self.encoder.parameters():
            p.requires_grad = False

    def train(self, mode=True):
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, x):
        return self.head(self.encoder(x))


torch.manual_seed(24)
generator = torch.Generator().manual_seed(24)
model = Probe(pretrain(generator), CLASSES)
train_x, train_y = glyphs(1536, CLASSES, generator, seed=2)
val_x, val_y = glyphs(512, CLASSES, generator, seed=2)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
for epoch in range(EPOCHS):
    model.train()
    for idx in torch.randperm(len(train_x)).split(BATCH):
        optimizer.zero_grad()
        F.cross_entropy(model(train_x[idx]), train_y[idx]).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        logits = model(val_x)
        acc = (logits.argmax(1) == val_y).float().mean().item()
        print(f"epoch {epoch} val loss {F.cross_entropy(logits, val_y).item():.4f} acc {acc:.3f}")
