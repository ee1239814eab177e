"""A tiny T5-like span filler, trained with a hand-written Adafactor whose second moment is a row and a column."""

import torch
import torch.nn.functional as F
from torch import nn


class RowColAdafactor(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, decay=0.8):
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                g, st = p.grad, self.state[p]
                st["t"] = st.get("t", 0) + 1
                beta = 1 - st["t"] ** -group["decay"]
                if p.dim() == 2:
                    st.setdefault("row", torch.zeros(p.shape[0]))
                    st.setdefault("col", torch.zeros(p.shape[1]))
                    st["row"].mul_(beta).add_(g.square().mean(1), alpha=1 - beta)
                    st["col"].mul_(beta).add_(g.square().mean(0), alpha=1 - beta)
                    v = torch.outer(st["row"], st["col"]) / st["row"].mean()
                    u = g * v.rsqrt()
                else:
                    st.setdefault("v", torch.zeros_like(p))
                    st["v"].mul_(beta).add_(g.square() + 1e-30, alpha=1 - beta)
                    u = g * st["v"].rsqrt()
                u.div_(max(1.0, u.norm().item() / u.numel() ** 0.5))
                p.sub_(u, alpha=group["lr"])


class SpanFiller(nn.Module):
    def __init__(self, vocab=40, d=24):
        super().__init__()
        self.shared = nn.Embedding(vocab, d)
        self.encoder = nn.TransformerEncoderLayer(d, 2, 48, dropout=0.0, batch_first=True)
        self.lm_head = nn.Linear(d, vocab)

    def forward(self, ids):
        return self.lm_head(self.encoder(self.shared(ids)))


MASK = 39


def spans(n, length=12):
    start = torch.randint(0, 20, (n, 1))
    ids = (start + torch.arange(length)) % 38
    hidden = torch.rand(n, length) < 0.2
    hidden[:, 0] = True
    return ids.masked_fill(hidden, MASK), ids, hidden


torch.manual_seed(14)
model = SpanFiller()
optimizer = RowColAdafactor(model.parameters())
for step in range(20):
    ids, target, hidden = spans(8)
    logits = model(ids)
    loss = F.cross_entropy(logits[hidden], target[hidden])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 0:
        print(f"step {step} loss {loss.item():.4f}")
