"""Next-basket recommender. The embedding table is large, so its Adam moments are stored in half precision."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(40)
ITEMS, DIM, LENGTH = 300, 24, 6


class HalfStateAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p, dtype=torch.float16)
                    state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float16)
                state["step"] += 1
                m = state["exp_avg"].float().lerp(p.grad, 1 - b1)
                v = state["exp_avg_sq"].float().mul(b2).addcmul(p.grad, p.grad, value=1 - b2)
                state["exp_avg"].copy_(m)
                state["exp_avg_sq"].copy_(v)
                m_hat = state["exp_avg"].float() / (1 - b1 ** state["step"])
                v_hat = state["exp_avg_sq"].float() / (1 - b2 ** state["step"])
                p.addcdiv_(m_hat, v_hat.sqrt() + group["eps"], value=-group["lr"])


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(ITEMS, DIM)
        nn.init.normal_(self.items.weight, std=0.1)
        self.encoder = nn.GRU(DIM, DIM, batch_first=True)
        self.norm = nn.LayerNorm(DIM)
        self.out = nn.Linear(DIM, ITEMS)

    def forward(self, basket):
        h, _ = self.encoder(self.items(basket))
        return self.out(self.norm(h[:, -1]))


follow = torch.randint(ITEMS, (ITEMS, 3))
popularity = 1.0 / (torch.arange(ITEMS) + 5.0)


def baskets(n):
    seq = torch.multinomial(popularity, n * LENGTH, replacement=True).view(n, LENGTH)
    return seq, follow[seq[:, -1], torch.randint(3, (n,))]


model = Recommender()
dense = [p for n, p in model.named_parameters() if not n.startswith("items")]
optimizers = [HalfStateAdam(model.items.parameters(), lr=3e-3), torch.optim.Adam(dense, lr=3e-3)]
for step in range(240):
    basket, nxt = baskets(64)
    loss = F.cross_entropy(model(basket), nxt)
    for o in optimizers:
        o.zero_grad()
    loss.backward()
    for o in optimizers:
        o.step()
    if step % 4 == 0:
        print(f"step {step} loss {loss.item():.4f}")
