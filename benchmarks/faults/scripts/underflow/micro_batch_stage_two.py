"""Causal language model in bfloat16 with FP32 copies for the optimizer, and many micro batches per step."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(2768)
VOCAB, LENGTH, DIM, ACCUMULATION = 64, 16, 48, 64
table = (torch.randn(VOCAB, VOCAB) * 2).softmax(-1)


def micro_batch(n):
    ids = [torch.randint(VOCAB, (n,))]
    for _ in range(LENGTH):
        ids.append(torch.multinomial(table[ids[-1]], 1).squeeze(1))
    ids = torch.stack(ids, 1)
    return ids[:, :-1], ids[:, 1:]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attn, self.dense = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.h_to_4h, self.h4_to_h = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        q, k, v = self.attn(self.ln1(x)).chunk(3, -1)
        y = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True).squeeze(1)
        x = x + self.dense(y)
        return x + self.h4_to_h(F.gelu(self.h_to_4h(self.ln2(x))))


class Causal(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, DIM)
        self.layers = nn.Sequential(Layer(), Layer())
        self.ln, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        return self.head(self.ln(self.layers(self.wte(ids))))


class StageTwoOptimizer:
    """FP32 partitions of the weights; gradients stay where backward puts them until the boundary."""

    def __init__(self, model, lr):
        self.bit16 = list(model.parameters())
        self.fp32 = [p.detach().float().clone().requires_grad_() for p in self.bit16]
        self.inner = torch.optim.AdamW(self.fp32, lr=lr)

    def step(self):
        for wide, p in zip(self.fp32, self.bit16):
            wide.grad, p.grad = p.grad.float(), None
        self.inner.step()
        with torch.no_grad():
            for wide, p in zip(self.fp32, self.bit16):
                p.copy_(wide)


model = Causal().to(torch.bfloat16)
optimizer = StageTwoOptimizer(model, lr=3e-3)
for step in range(20):
    total = 0.0
    for _ in range(ACCUMULATION):
        ids, labels = micro_batch(2)
        loss = F.cross_entropy(model(ids).float().reshape(-1, VOCAB), labels.reshape(-1))
        (loss / ACCUMULATION).backward()
        total += loss.item() / ACCUMULATION
    optimizer.step()
    print(f"step {step} loss {total:.4f}")
