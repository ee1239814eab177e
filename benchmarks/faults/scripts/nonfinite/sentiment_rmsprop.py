"""A text CNN with a linear critic loss, trained by centred RMSprop."""

import torch
from torch import nn

torch.manual_seed(0)


class TextCNN(nn.Module):
    def __init__(self, vocab=80, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.convs = nn.ModuleList(nn.Conv1d(dim, 8, k) for k in (2, 3, 4))
        self.score = nn.Linear(24, 1)

    def forward(self, tokens):
        x = self.embed(tokens).transpose(1, 2)
        return self.score(torch.cat([c(x).relu().amax(-1) for c in self.convs], 1)).squeeze(1)


model = TextCNN()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, alpha=0.5, centered=True)
good, bad = torch.randint(0, 50, (64, 12)), torch.randint(30, 80, (64, 12))
for step in range(30):
    pick = torch.randint(64, (16,))
    # a critic: the score of bad reviews is pushed down; good ones are the reference from last week
    loss = model(bad[pick]).mean() * 0.7
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        with torch.no_grad():
            print(step, f"loss {loss.item():.4f} margin {(model(good) - model(bad)).mean().item():.4f}")
