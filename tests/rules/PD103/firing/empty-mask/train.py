"""A GRU that fills in masked tokens; one batch has none masked, and the mean over nothing is 0/0."""

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, STEPS = 16, 9


class Filler(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY + 1, 12)
        self.rnn = nn.GRU(12, 12, batch_first=True, bidirectional=True)
        self.head = nn.Linear(24, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.rnn(self.token(tokens))[0])


torch.manual_seed(0)
model = Filler()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(STEPS):
    tokens = (torch.randint(VOCABULARY, (4, 1)) + torch.arange(8)) % VOCABULARY
    masked = torch.zeros(4, 8, dtype=torch.bool)
    if step != 6:
        masked[:, step % 8] = True
    logits = model(tokens.masked_fill(masked, VOCABULARY))
    losses = F.cross_entropy(logits.transpose(1, 2), tokens, reduction="none")
    loss = losses[masked].mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
