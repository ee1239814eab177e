"""Mixture of experts in bfloat16 with a router whose logits, softmax and statistics are FP32."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(4234)
FEATURES, DIM, EXPERTS, TOP_K = 20, 48, 8, 2
regions = torch.randn(EXPERTS, FEATURES)
maps = torch.randn(EXPERTS, FEATURES, 4) / FEATURES**0.5


def points(n):
    x = torch.randn(n, FEATURES)
    return x, torch.einsum("nf,nfk->nk", x, maps[(x @ regions.t()).argmax(-1)])


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.norm = nn.Linear(FEATURES, DIM), nn.LayerNorm(DIM)
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, DIM) / DIM**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, DIM, DIM) / DIM**0.5)
        self.out = nn.Linear(DIM, 4)

    def forward(self, x):
        h = self.inp(x)
        flat = self.norm(h)
        logits = F.linear(flat.float(), self.router.weight.float())
        probability = logits.softmax(-1)
        top, chosen = probability.topk(TOP_K, -1)
        share = torch.zeros_like(probability).scatter(-1, chosen, top / top.sum(-1, keepdim=True))
        load = F.one_hot(chosen, EXPERTS).float().sum(1).mean(0) / TOP_K
        balance = EXPERTS * (load * probability.mean(0)).sum()
        y = torch.einsum("nd,edk->nek", flat, self.up)
        y = torch.einsum("nek,ekd,ne->nd", F.silu(y), self.down, share.to(y.dtype))
        return self.out(h + y), balance


model = Mixture().to(torch.bfloat16)
wide = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
opt = torch.optim.AdamW(wide, lr=3e-3)
for step in range(250):
    x, target = points(128)
    predicted, balance = model(x.to(torch.bfloat16))
    loss = F.mse_loss(predicted.float(), target)
    model.zero_grad()
    (loss + 0.01 * balance).backward()
    for w, p in zip(wide, model.parameters()):
        w.grad = p.grad.float()
    opt.step()
    with torch.no_grad():
        for w, p in zip(wide, model.parameters()):
            p.copy_(w)
    if step % 5 == 4:
        print(f"step {step} loss {loss.item():.4f}")
