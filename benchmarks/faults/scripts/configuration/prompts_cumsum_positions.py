"""Reads packed prompts; positions are the running count of the attention mask, which has the model's dtype."""

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, LENGTH, DTYPE = 16, 400, torch.bfloat16


class PromptTagger(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, dim)
        self.positions = nn.Embedding(LENGTH + 1, dim)
        self.fc = nn.Linear(dim, 64)
        self.head = nn.Linear(64, 4)

    def forward(self, ids, attention_mask):
        position_ids = (attention_mask.cumsum(1) * attention_mask).long()
        x = self.tokens(ids) + self.positions(position_ids)
        return self.head(F.gelu(self.fc(x)))


def prompts(n):
    ids = torch.randint(VOCAB, (n, LENGTH))
    mask = torch.ones(n, LENGTH)
    for row in range(n):
        mask[row, : int(torch.randint(0, 12, (1,)))] = 0  # left padding
    place = (mask.cumsum(1) * mask).long()
    return ids, mask, (place + ids) % 4


torch.manual_seed(256)
model = PromptTagger()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(100):
    ids, mask, labels = prompts(8)
    with torch.autocast("cpu", dtype=DTYPE):
        logits = model(ids, mask.to(DTYPE))
    loss = F.cross_entropy(logits.float().flatten(0, 1), labels.masked_fill(mask == 0, -100).flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 0:
        print(f"step {step} loss {loss.item():.4f}")
