"""Causal language model whose parameters are gathered in bfloat16; the optimizer holds them in FP32."""

import torch
import torch.nn.functional as F
from loss_functions import CLMCrossEntropyLoss
from torch import nn

torch.manual_seed(464)
VOCAB, LENGTH, DIM = 512, 16, 48
successor = torch.randint(VOCAB, (VOCAB, 4))


def sequences(n):
    ids = [torch.randint(VOCAB, (n,))]
    for _ in range(LENGTH - 1):
        ids.append(successor[ids[-1], torch.randint(4, (n,))])
    return torch.stack(ids, 1)


class GPT2(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, DIM)
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.c_fc, self.c_proj = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.wte(ids)
        x = x + self.c_proj(F.gelu(self.c_fc(self.norm1(x))))
        return self.lm_head(self.norm2(x))


class MixedPrecisionPolicy:
    def __init__(self, model, param_dtype):
        self.params = list(model.to(param_dtype).parameters())
        self.shards = [p.detach().float().clone().requires_grad_() for p in self.params]

    def reduce(self):
        for s, p in zip(self.shards, self.params):
            s.grad, p.grad = p.grad.float(), None

    @torch.no_grad()
    def gather(self):
        for s, p in zip(self.shards, self.params):
            p.copy_(s)


model, loss_fun = GPT2(), CLMCrossEntropyLoss()
policy = MixedPrecisionPolicy(model, torch.bfloat16)
opt = torch.optim.AdamW(policy.shards, lr=3e-3, weight_decay=0.0)
for step in range(160):
    ids = sequences(24)
    logits = model(ids)
    loss = loss_fun(logits, ids)
    loss.backward()
    policy.reduce()
    opt.step()
    policy.gather()
    if step % 5 == 4:
        print(f"step {step} loss {loss.item():.4f}")
