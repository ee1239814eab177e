"""A small language model whose BF16 weights are the only copy; the optimizer rounds to them stochastically."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(1124)
DTYPE = torch.bfloat16
VOCAB, LENGTH, DIM = 48, 12, 40
table = (torch.randn(VOCAB, VOCAB) * 2).softmax(-1)


def stochastic_round(x):
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32)
    return ((x.view(torch.int32) + noise) & -65536).view(torch.float32)


class AdamW(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"], state["exp_avg_sq"] = (torch.zeros(p.shape) for _ in range(2))
                state["step"] += 1
                grad, wide = p.grad.float(), p.float()
                state["exp_avg"].lerp_(grad, 1 - beta1)
                state["exp_avg_sq"].lerp_(grad.square(), 1 - beta2)
                denom = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt() + group["eps"]
                update = state["exp_avg"] / (1 - beta1 ** state["step"]) / denom
                wide = wide - group["lr"] * (update + group["weight_decay"] * wide)
                p.copy_(stochastic_round(wide) if p.dtype == torch.bfloat16 else wide)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.context = nn.Conv1d(DIM, DIM, 3, padding=2)
        self.norm = nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.context(x.transpose(1, 2))[..., : ids.size(1)].transpose(1, 2)
        return self.head(x + self.mlp(self.norm(x)))


def sequences(n):
    ids = [torch.randint(VOCAB, (n,))]
    for _ in range(LENGTH):
        ids.append(torch.multinomial(table[ids[-1]], 1).squeeze(1))
    return torch.stack(ids, 1)


model = Model().to(DTYPE)
opt = AdamW(model.parameters(), lr=6e-4)
for step in range(220):
    ids = sequences(32)
    loss = F.cross_entropy(model(ids[:, :-1]).float().reshape(-1, VOCAB), ids[:, 1:].reshape(-1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 5 == 4:
        print(f"step {step} loss {loss.item():.4f}")
