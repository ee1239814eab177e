"""An LSTM over lines of verse; the clip bites in nearly every step at first."""

import torch
import torch.nn as nn


class Poet(nn.Module):
    def __init__(self, vocab=20, dim=24, hidden=64):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.lstm = nn.LSTM(dim, hidden, 2, batch_first=True)
        self.out = nn.Linear(hidden, vocab)

    def forward(self, ids):
        return self.out(self.lstm(self.embed(ids))[0])


torch.manual_seed(29)
follow = torch.softmax(2.5 * torch.randn(20, 20), 1)
poet = Poet()
opt = torch.optim.SGD(poet.parameters(), lr=4.0, momentum=0.5)
criterion = nn.CrossEntropyLoss()
for step in range(150):
    ids = [torch.randint(0, 20, (32,))]
    for _ in range(14):
        ids.append(torch.multinomial(follow[ids[-1]], 1).squeeze(1))
    ids = torch.stack(ids, 1)
    loss = criterion(poet(ids[:, :-1]).transpose(1, 2), ids[:, 1:])
    opt.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(poet.parameters(), 0.1)
    opt.step()
    if step % 6 == 0:
        print(f"step {step} loss {loss.item():.4f} norm {norm:.3f} {'clipped' if norm > 0.1 else ''}")
