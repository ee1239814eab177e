"""Continues book-keeping sequences with a post-norm Transformer: Noam's schedule, summed loss, gradients always clipped."""

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, T, D = 24, 12, 48


class LedgerNet(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, D), nn.Embedding(T, D)
        layer = nn.TransformerEncoderLayer(D, 4, 4 * D, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(D, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=D**-0.5)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.size(1))
        x = self.embed(ids) * D**0.5 + self.position(torch.arange(ids.size(1)))
        return self.head(self.encoder(x, mask=mask, is_causal=True))


def ledgers(n):
    first = torch.randint(VOCAB, (n, 1))
    step = torch.randint(1, 4, (n, 1))
    return (first + step * torch.arange(T + 1)) % VOCAB


torch.manual_seed(1858)
model = LedgerNet()
optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
noam = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.5 * D**-0.5 * min((s + 1) ** -0.5, (s + 1) * 400**-1.5))
for step in range(150):
    rows = ledgers(32)
    logits = model(rows[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum", label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    noam.step()
    if step % 5 == 0:
        print(f"step {step} norm {norm:.0f} loss {loss.item() / rows[:, 1:].numel():.4f}")
