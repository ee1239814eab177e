"""BF16 weights whose updates are rounded stochastically, with small steps."""

import torch
from torch import nn


def dithered(x, dtype):
    """Adds noise of one unit in the last place of BF16 before rounding: right in the mean."""
    ulp = torch.exp2(torch.floor(torch.log2(x.abs().clamp(min=1e-30))) - 7)
    return (x + (torch.rand_like(x) - 0.5) * ulp).to(dtype)


class DitheredAdam(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.95), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (b1, b2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                s = self.state[p]
                if not s:
                    s.update(t=0, m=torch.zeros(p.shape), v=torch.zeros(p.shape))
                s["t"] += 1
                g = p.grad.to(torch.float32)
                s["m"].lerp_(g, 1 - b1)
                s["v"].lerp_(g * g, 1 - b2)
                m, v = s["m"] / (1 - b1 ** s["t"]), s["v"] / (1 - b2 ** s["t"])
                wide = p.to(torch.float32) - lr * m / (v.sqrt() + group["eps"])
                p.copy_(dithered(wide, p.dtype))


class CharModel(nn.Module):
    def __init__(self, vocab=20, context=4, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.hidden = nn.Linear(context * dim, 64)
        self.out = nn.Linear(64, vocab)

    def forward(self, ids):
        return self.out(torch.tanh(self.hidden(self.embed(ids).flatten(1))))


def windows(n, rule):
    ids = torch.randint(20, (n, 4))
    following = rule[ids[:, -1], ids[:, -2] % 2]
    return ids, torch.where(torch.rand(n) < 0.1, torch.randint(20, (n,)), following)


def main():
    torch.manual_seed(21103)
    rule = torch.randint(20, (20, 2))
    model = CharModel().to(torch.bfloat16)
    optimizer = DitheredAdam(model.parameters(), lr=1e-3)
    for step in range(80):
        ids, following = windows(96, rule)
        loss = nn.functional.cross_entropy(model(ids).to(torch.float32), following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 2 == 0:
            print(f"{step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
