"""Few-shot fine-tuning of a small pretrained transformer with the optimizer of the original BERT code."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim import Optimizer

VOCAB, LENGTH = 60, 16


class BertAdam(Optimizer):
    def __init__(self, params, lr, warmup=0.1, t_total=-1, b1=0.9, b2=0.999, e=1e-6, weight_decay=0.01):
        defaults = dict(lr=lr, warmup=warmup, t_total=t_total, b1=b1, b2=b2, e=e, weight_decay=weight_decay)
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["next_m"], state["next_v"] = torch.zeros_like(p), torch.zeros_like(p)
                next_m, next_v = state["next_m"], state["next_v"]
                next_m.mul_(group["b1"]).add_(p.grad, alpha=1 - group["b1"])
                next_v.mul_(group["b2"]).addcmul_(p.grad, p.grad, value=1 - group["b2"])
                state["step"] += 1
                update = next_m / (next_v.sqrt() + group["e"])
                update += group["weight_decay"] * p
                done = state["step"] / group["t_total"]
                p.add_(update, alpha=-group["lr"] * max(1 - done, 0.0))


class Bert(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.word, self.position = nn.Embedding(VOCAB + 1, dim), nn.Embedding(LENGTH, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.unmask, self.pooler = nn.Linear(dim, VOCAB), nn.Linear(dim, 4)

    def forward(self, ids):
        return self.encoder(self.word(ids) + self.position.weight)


def sentences(n):
    start, stride = torch.randint(VOCAB, (n, 1)), torch.randint(1, 5, (n, 1))
    return (start + stride * torch.arange(LENGTH)) % VOCAB, stride.squeeze(1) - 1


torch.manual_seed(73)
bert = Bert()
pretraining = torch.optim.Adam(bert.parameters(), lr=2e-3)
for _ in range(120):
    ids, _ = sentences(32)
    hidden = torch.rand(ids.shape) < 0.2
    logits = bert.unmask(bert(ids.masked_fill(hidden, VOCAB)))
    F.cross_entropy(logits[hidden], ids[hidden]).backward()
    pretraining.step()
    pretraining.zero_grad()

train_ids, train_label = sentences(400)
held_ids, held_label = sentences(256)
optimizer = BertAdam(bert.parameters(), lr=5e-3, t_total=90)
for step in range(90):
    pick = torch.randint(len(train_ids), (16,))
    optimizer.zero_grad()
    F.cross_entropy(bert.pooler(bert(train_ids[pick]).mean(1)), train_label[pick]).backward()
    optimizer.step()
    if step % 3 == 2:
        with torch.no_grad():
            loss = F.cross_entropy(bert.pooler(bert(held_ids).mean(1)), held_label)
        print(f"step {step + 1} eval loss {loss.item():.4f}")
