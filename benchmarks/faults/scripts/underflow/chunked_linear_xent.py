"""A language model whose head and cross entropy are one function that goes through the tokens in chunks."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(830)
VOCAB, LENGTH, DIM, CHUNK = 64, 32, 32, 8
table = (torch.randn(VOCAB, VOCAB) * 2).softmax(-1)


def backward_chunks(hidden, weight, labels, total):
    """Losses and gradients, chunk by chunk; the logits of all tokens never exist at once."""
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
    loss = torch.zeros((), dtype=torch.float32)
    for start in range(0, len(hidden), CHUNK):
        h, y = hidden[start : start + CHUNK], labels[start : start + CHUNK]
        logits = (h @ weight.t()).float()
        loss += F.cross_entropy(logits, y, reduction="sum") / total
        grad = ((logits.softmax(-1) - F.one_hot(y, VOCAB)) / total).to(h.dtype)
        grad_hidden[start : start + CHUNK] = grad @ weight
        grad_weight += grad.t() @ h
    return loss, grad_hidden, grad_weight


class LigerFusedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels):
        loss, grad_hidden, grad_weight = backward_chunks(hidden, weight, labels, len(hidden))
        ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx, grad):
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad.to(grad_hidden.dtype), grad_weight * grad.to(grad_weight.dtype), None


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, DIM) / DIM**0.5)

    def forward(self, hidden, labels):
        return LigerFusedLinearCrossEntropy.apply(hidden.flatten(0, 1), self.weight, labels.flatten())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
        self.lm_head = Head()

    def forward(self, ids, labels):
        x = self.embed(ids)
        x = self.norm2(x + self.mlp(self.norm1(x)))
        return x, self.lm_head(x, labels)


def sequences(n):
    ids = [torch.randint(VOCAB, (n,))]
    for _ in range(LENGTH):
        ids.append(torch.multinomial(table[ids[-1]], 1).squeeze(1))
    ids = torch.stack(ids, 1)
    return ids[:, :-1], ids[:, 1:]


model = Model().to(torch.bfloat16)
master = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
opt = torch.optim.AdamW(master, lr=3e-3, weight_decay=0.0)
for step in range(60):
    ids, labels = sequences(32)
    hidden, loss = model(ids, labels)
    model.zero_grad()
    loss.backward()
    for m, p in zip(master, model.parameters()):
        m.grad = p.grad.float()
    opt.step()
    with torch.no_grad():
        for m, p in zip(master, model.parameters()):
            p.copy_(m)
    print(f"step {step} loss {loss.item():.4f}")
