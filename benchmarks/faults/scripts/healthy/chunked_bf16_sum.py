"""Token counts and token losses of many chunks are summed in FP32, although the network works in BF16."""

import torch
import torch.nn.functional as F
from torch import nn


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.mix, self.tag = nn.Embedding(40, 24), nn.Linear(24, 48), nn.Linear(48, 5)

    def forward(self, tokens):
        return self.tag(F.gelu(self.mix(self.words(tokens))))


torch.manual_seed(3235)
tag_of = torch.randint(0, 5, (40,))
model = Tagger()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(40):
    tokens = torch.randint(0, 40, (8, 64))
    mask = torch.rand(8, 64) < 0.7
    total, count = torch.zeros(()), torch.zeros(())
    for chunk, kept in zip(tokens, mask):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(chunk)
        each = F.cross_entropy(logits.float(), tag_of[chunk], reduction="none")
        total = total + (each * kept).sum()
        count = count + kept.sum()
    loss = total / count
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 0:
        print(f"step {step} tokens {int(count)} loss {loss.item():.4f}")
