"""LoRA on a frozen FP16 base: B starts at zero, so A has no gradient in the first step."""

import torch
from torch import nn


class LoraLinear(nn.Module):
    def __init__(self, base, rank=4, alpha=16.0):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scaling = alpha / rank

    def forward(self, x):
        frozen = self.base(x.to(self.base.weight.dtype)).to(x.dtype)
        return frozen + self.scaling * (x @ self.lora_a.t()) @ self.lora_b.t()


class Backbone(nn.Module):
    def __init__(self, inputs=16, hidden=64, outputs=5):
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden)
        self.classifier = nn.Linear(hidden, outputs)

    def forward(self, x):
        x = torch.nn.functional.silu(self.q_proj(x))
        x = x + torch.nn.functional.silu(self.o_proj(x))
        return self.classifier(x)


def inject(model, names):
    for p in model.parameters():
        p.requires_grad_(False)
    for name in names:
        base = getattr(model, name).to(torch.float16)
        setattr(model, name, LoraLinear(base))
    return model


def patients(n, rotation):
    x = torch.randn(n, 16)
    return x, (x @ rotation).argmax(1)


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def main():
    torch.manual_seed(21109)
    model = inject(Backbone(), ["q_proj", "o_proj", "classifier"])
    rotation = torch.randn(16, 5)
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-2, weight_decay=0.0)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 8))
    for step in range(60):
        x, label = patients(96, rotation)
        loss = nn.functional.cross_entropy(model(x), label)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        warmup.step()
        if step % 2 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
