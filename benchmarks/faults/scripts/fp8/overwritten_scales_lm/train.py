"""Next-token training with FP8 layers; gradients and FP8 statistics form one tree, as the train step returns them."""

import torch
import torch.nn.functional as F
from fp8_ops import Fp8Dense
from torch import nn

torch.manual_seed(672)
VOCAB, WINDOW, DIM = 48, 8, 32
GRADIENT_CLIPPING_THRESHOLD = 1.0
table = (torch.randn(VOCAB, VOCAB) * 2).softmax(-1)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.wi_0, self.wi_1 = Fp8Dense(WINDOW * DIM, 128), Fp8Dense(WINDOW * DIM, 128)
        self.wo = Fp8Dense(128, DIM)
        self.norm = nn.RMSNorm(DIM, eps=1e-6)
        self.logits_dense = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.embed(ids).flatten(1)
        return self.logits_dense(self.norm(self.wo(F.silu(self.wi_0(x)) * self.wi_1(x))))


def windows(n):
    ids = [torch.randint(VOCAB, (n,))]
    for _ in range(WINDOW):
        ids.append(torch.multinomial(table[ids[-1]], 1).squeeze(1))
    return torch.stack(ids[:-1], 1), ids[-1]


def clip_by_global_norm(tree, limit):
    norm = torch.sqrt(sum(x.square().sum() for x in tree.values()))
    factor = limit / torch.clamp(norm, min=limit)
    return {k: x * factor for k, x in tree.items()}


def gradient_tree(model):
    raw = {name: p.grad for name, p in model.named_parameters()}
    stats = {}
    for name, module in model.named_modules():
        if isinstance(module, Fp8Dense):
            stats |= {f"{name}.{key}": value for key, value in module.overwrite.items()}
    return raw, stats


model = Mlp()
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
layers = dict(model.named_modules())
for step in range(200):
    ids, following = windows(64)
    loss = F.cross_entropy(model(ids), following)
    opt.zero_grad()
    loss.backward()
    raw, stats = gradient_tree(model)
    tree = clip_by_global_norm(raw | stats, GRADIENT_CLIPPING_THRESHOLD)
    for name, p in model.named_parameters():
        p.grad = tree[name]
    opt.step()
    for name in stats:
        owner, _, key = name.rpartition(".")
        layers[owner].fp8_params[key] = tree[name]
    if step % 5 == 4:
        print(f"step {step} loss {loss.item():.4f}")
