"""Categories of products from bags of words: a large table with dense gradients, of which a batch touches one row in fifty."""

import torch
import torch.nn.functional as F
from torch import nn


class Bags(nn.Module):
    def __init__(self, words=5000, dim=24, classes=8):
        super().__init__()
        self.title = nn.EmbeddingBag(words, dim, mode="mean")
        self.maker = nn.Embedding(2000, dim, padding_idx=0)
        self.hidden, self.out = nn.Linear(2 * dim, 32), nn.Linear(32, classes)

    def forward(self, words, maker):
        x = torch.cat([self.title(words), self.maker(maker)], -1)
        return self.out(F.relu(self.hidden(x)))


def zipf(rows, shape):
    return (rows ** torch.rand(shape)).long() - 1


torch.manual_seed(1)
model = Bags()
decay = [p for n, p in model.named_parameters() if n.endswith("weight")]
rest = [p for n, p in model.named_parameters() if not n.endswith("weight")]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)
topic = torch.randint(8, (5000,))
for step in range(150):
    words = zipf(5000, (32, 6))
    y = topic[words[:, 0]]
    words[:, 1:3] = words[:, :1]
    maker = torch.where(torch.rand(32) < 0.8, 0, zipf(2000, (32,)))
    loss = F.cross_entropy(model(words, maker), y, label_smoothing=0.05)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 3 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
