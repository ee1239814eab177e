"""An LSTM whose very weights are BF16, at a learning rate of 1e-5: next to no update is large enough to stick."""

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, STEPS = 16, 16, 8


class Characters(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.rnn(self.token(tokens))[0])


torch.manual_seed(0)
model = Characters().bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for step in range(STEPS):
    tokens = (torch.randint(VOCABULARY, (8, 1)) + torch.arange(9)) % VOCABULARY
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
