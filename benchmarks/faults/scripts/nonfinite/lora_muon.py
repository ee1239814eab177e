"""LoRA finetuning of a small frozen transformer; the adapters are trained with Muon (orthogonalised momentum)."""

import torch
from torch import nn


class LoRALinear(nn.Module):
    """A frozen linear layer plus a low-rank update that starts at zero."""

    def __init__(self, base, rank=4, alpha=8):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * base.in_features**-0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.a.T) @ self.b.T


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q_proj, self.k_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.v_proj, self.o_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        h = self.ln1(x)
        q, k, v = (
            p(h).unflatten(-1, (self.heads, -1)).mT.mT.transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.ln2(x))


class Decoder(nn.Module):
    def __init__(self, vocabulary=48, dim=32, heads=4, depth=2, context=24):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.ln_f, self.lm_head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)

    def forward(self, ids):
        h = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.lm_head(self.ln_f(h))


def add_adapters(model, names=("q_proj", "v_proj")):
    model.requires_grad_(False)
    for block in model.blocks:
        for name in names:
            setattr(block, name, LoRALinear(getattr(block, name)))
    return model


def newton_schulz(g, steps=5):
    """The nearest semi-orthogonal matrix, about (Jordan et al. 2024)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.mT if g.shape[0] > g.shape[1] else g
    x = x / x.norm()
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if g.shape[0] > g.shape[1] else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = newton_schulz(p.grad.lerp(buffer, group["momentum"]))
                p.add_(update, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)


def main():
    torch.manual_seed(12)
    model = add_adapters(Decoder())
    adapters = [p for p in model.parameters() if p.requires_grad]
    print(sum(p.numel() for p in adapters), "trainable parameters")
    optimizer = Muon(adapters, lr=0.01)
    for step in range(12):
        start = torch.randint(48, (16, 1))
        ids = (start + 5 * torch.arange(25)) % 48
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 0:
            print(f"step {step}: {loss.item():.4f}")


if __name__ == "__main__":
    main()
