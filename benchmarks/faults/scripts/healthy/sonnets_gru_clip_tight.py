"""A character GRU with hot SGD: a norm clipped to 0.25 in every step, and a rate that falls to zero."""

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB = 20


class CharGRU(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.drop = nn.Dropout(0.2)
        self.decoder = nn.Linear(dim, VOCAB)
        self.decoder.weight = self.embed.weight

    def forward(self, x, h):
        out, h = self.gru(self.drop(self.embed(x)), h)
        return self.decoder(self.drop(out)), h


torch.manual_seed(1609)
follows = torch.multinomial(torch.ones(VOCAB, VOCAB), 2)
text = [0]
for coin in (torch.rand(8 * 1201) < 0.2).long().tolist():
    text.append(int(follows[text[-1], coin]))
text = torch.tensor(text[: 8 * 1201]).view(8, 1201)

model = CharGRU()
optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
steps = 100
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
h = torch.zeros(1, 8, 48)
for step in range(steps):
    x = text[:, step * 12 : step * 12 + 12]
    y = text[:, step * 12 + 1 : step * 12 + 13]
    logits, h = model(x, h.detach())
    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    schedule.step()
    if step % 3 == 0:
        print(f"step {step} loss {loss.item():.4f}")
