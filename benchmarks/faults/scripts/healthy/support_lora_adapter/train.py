"""Adapts a ticket classifier to another product with LoRA on the attention and feed-forward layers."""

import torch
import torch.nn.functional as F

from lora import add_lora
from model import TicketClassifier

VOCAB, CLASSES, WORDS = 90, 5, 8


def tickets(n, weight, generator):
    ids = torch.randint(VOCAB, (n, WORDS), generator=generator)
    return ids, weight[ids].sum(1).argmax(1)


def fit(model, ids, labels, epochs, lr, report):
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=lr, weight_decay=0.0)
    for epoch in range(epochs):
        total, batches = 0.0, torch.randperm(len(ids)).split(64)
        for idx in batches:
            loss = F.cross_entropy(model(ids[idx]), labels[idx])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        if report:
            print(f"epoch {epoch} loss {total / len(batches):.4f}")


torch.manual_seed(67)
generator = torch.Generator().manual_seed(67)
old = torch.randn(VOCAB, CLASSES, generator=generator)
new = torch.where(
    torch.rand(VOCAB, 1, generator=generator) < 0.5, torch.randn(VOCAB, CLASSES, generator=generator), old
)

model = TicketClassifier(VOCAB, CLASSES)
fit(model, *tickets(1024, old, generator), epochs=3, lr=2e-3, report=False)
model = add_lora(model, ("q_proj", "v_proj", "up", "down"))
model.classifier.requires_grad_(True)
fit(model, *tickets(1024, new, generator), epochs=12, lr=5e-3, report=True)
