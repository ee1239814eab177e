"""Low-rank adapters on a frozen text encoder, clause classification; layer-wise scaled Adam for the large batch."""

import torch
import torch.nn.functional as F
from torch import nn


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 4, alpha: float = 8.0):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scaling = alpha / rank

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.lora_a), self.lora_b) * self.scaling


class Layer(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query = LoRALinear(nn.Linear(width, width))
        self.key = nn.Linear(width, width).requires_grad_(False)
        self.value = LoRALinear(nn.Linear(width, width))
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        for part in (self.norm1, self.norm2, self.mlp):
            part.requires_grad_(False)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x):
        h = self.norm1(x)
        y = F.scaled_dot_product_attention(
            self.split(self.query(h)), self.split(self.key(h)), self.split(self.value(h))
        )
        x = x + y.transpose(1, 2).flatten(2)
        return x + self.mlp(self.norm2(x))


class ClauseClassifier(nn.Module):
    def __init__(self, vocabulary=80, width=32, depth=2, classes=4):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width).requires_grad_(False)
        self.layers = nn.ModuleList([Layer(width) for _ in range(depth)])
        self.classifier = nn.Linear(width, classes)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.classifier(x.mean(1))


class Lamb(torch.optim.Optimizer):
    """Adam whose step is scaled, tensor by tensor, to the norm of the weights."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

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
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                m, v = state["m"], state["v"]
                m.lerp_(p.grad, 1 - b1)
                v.lerp_(p.grad.square(), 1 - b2)
                m_hat, v_hat = m / (1 - b1 ** state["step"]), v / (1 - b2 ** state["step"])
                update = m_hat / (v_hat.sqrt() + group["eps"]) + group["weight_decay"] * p
                weight_norm, update_norm = p.norm(), update.norm()
                trust = torch.where(weight_norm > 0, weight_norm / update_norm, torch.ones_like(weight_norm))
                p.sub_(update * trust, alpha=group["lr"])


def clauses(n, generator):
    label = torch.randint(0, 4, (n,), generator=generator)
    ids = torch.randint(0, 80, (n, 24), generator=generator)
    marked = torch.rand(n, 24, generator=generator) < 0.3
    return torch.where(marked, label[:, None] * 20 + ids % 20, ids), label


def main():
    torch.manual_seed(41)
    generator = torch.Generator().manual_seed(42)
    model = ClauseClassifier()
    trainable = [p for p in model.parameters() if p.requires_grad]
    print(f"trainable: {sum(p.numel() for p in trainable)} of {sum(p.numel() for p in model.parameters())}")
    optimizer = Lamb(trainable, lr=1e-2)
    for step in range(30):
        ids, label = clauses(64, generator)
        loss = F.cross_entropy(model(ids), label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.4f}")


main()
