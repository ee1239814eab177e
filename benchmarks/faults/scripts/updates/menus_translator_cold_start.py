"""A post-norm Transformer that translates menus. The rate came from a smaller model; there is no warm-up."""

import torch
import torch.nn as nn
import torch.nn.functional as F

WARMUP = 1
LR = 1e-2
VOCAB, LENGTH, D = 24, 8, 32


class Translator(nn.Module):
    def __init__(self, layers=6):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        self.position = nn.Parameter(torch.randn(LENGTH, D) * 0.02)
        layer = nn.TransformerEncoderLayer(D, 4, 4 * D, dropout=0.0, batch_first=True, norm_first=False)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.generator = nn.Linear(D, VOCAB)

    def forward(self, src):
        return self.generator(self.encoder(self.embed(src) + self.position))


def batch(n=32):
    src = torch.randint(1, VOCAB, (n, LENGTH))
    # word for word, but the last word comes first
    tgt = dictionary[src].roll(1, dims=1)
    return src, tgt


torch.manual_seed(1471)
dictionary = torch.cat([torch.zeros(1, dtype=torch.long), torch.randperm(VOCAB - 1) + 1])
model = Translator()
optimizer = torch.optim.Adam(model.parameters(), lr=LR, betas=(0.9, 0.98))
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / WARMUP, 1.0))

model.train()
for step in range(150):
    src, tgt = batch()
    logits = model(src)
    loss = F.cross_entropy(logits.flatten(0, 1), tgt.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 5 == 0:
        print(f"step {step:4d} | loss {loss.item():.3f}")
