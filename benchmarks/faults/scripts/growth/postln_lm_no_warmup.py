"""Post-LN language model trained by Adam at its full learning rate from the first step."""

import torch
import torch.nn as nn
import torch.nn.functional as F

WARMUP = 0
VOCAB, LENGTH, DIM = 32, 16, 48


class PostLNModel(nn.Module):
    def __init__(self, layers=6):
        super().__init__()
        self.token = nn.Embedding(VOCAB, DIM)
        self.position = nn.Embedding(LENGTH, DIM)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(DIM, 4, 4 * DIM, dropout=0.0, batch_first=True, norm_first=False)
            for _ in range(layers)
        )
        self.lm_head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        h = self.token(ids) + self.position.weight
        for layer in self.layers:
            h = layer(h, src_mask=mask)
        return self.lm_head(h)


def sentences(n, table):
    ids = torch.randint(VOCAB, (n, 1))
    for _ in range(LENGTH):
        follow = table[ids[:, -1], torch.randint(2, (n,))]
        ids = torch.cat([ids, follow.unsqueeze(1)], 1)
    return ids[:, :-1], ids[:, 1:]


torch.manual_seed(2142)
table = torch.randint(VOCAB, (VOCAB, 2))
model = PostLNModel()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.98))
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / max(WARMUP, 1)))
for step in range(100):
    ids, labels = sentences(16, table)
    loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 4 == 0:
        print(f"step {step} loss {loss.item():.4f}")
