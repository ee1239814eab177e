"""Next-note prediction with a GRU; gradients are clipped to a small norm, as in the original recipe."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(81)
NOTES, BARS, HIDDEN, CLIP = 24, 24, 64, 0.1
transition = torch.softmax(2.5 * torch.randn(NOTES, NOTES), 1)


def melodies(n):
    notes = [torch.randint(NOTES, (n,))]
    for _ in range(BARS):
        notes.append(torch.multinomial(transition[notes[-1]], 1)[:, 0])
    return torch.stack(notes, 1)


class MelodyGRU(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(NOTES, 32)
        self.cell = nn.GRUCell(32, HIDDEN)
        self.out = nn.Linear(HIDDEN, NOTES)

    def forward(self, notes):
        h = torch.zeros(len(notes), HIDDEN)
        states = []
        for e in self.embed(notes).unbind(1):
            h = self.cell(e, h)
            states.append(h)
        return self.out(torch.stack(states, 1))


model = MelodyGRU()
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
clipped = 0
for step in range(1, 161):
    batch = melodies(32)
    loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    clipped += bool(norm > CLIP)
    optimizer.step()
    if step % 8 == 0:
        print(f"step {step} loss {loss.item():.4f} |g| {norm.item():.3f} clipped {clipped}/{step}")
