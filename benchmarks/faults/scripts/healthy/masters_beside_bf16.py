"""BF16 weights with FP32 masters kept by hand; a learning rate far below an ulp of BF16."""

import torch
import torch.nn as nn


class MasterWeights:
    def __init__(self, model, make_optimizer):
        self.low = [p for p in model.parameters() if p.requires_grad]
        self.high = [nn.Parameter(p.detach().to(torch.float32)) for p in self.low]
        self.optimizer = make_optimizer(self.high)

    def step(self):
        for low, high in zip(self.low, self.high):
            high.grad = low.grad.to(torch.float32)
            low.grad = None
        self.optimizer.step()
        with torch.no_grad():
            for low, high in zip(self.low, self.high):
                low.copy_(high)


class Mixer(nn.Module):
    def __init__(self, tokens=8, dim=24):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.across, self.within = nn.Linear(tokens, tokens), nn.Linear(dim, dim)

    def forward(self, x):
        x = x + self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + nn.functional.gelu(self.within(self.norm2(x)))


class Classifier(nn.Module):
    def __init__(self, dim=24, classes=4):
        super().__init__()
        self.embed = nn.Linear(12, dim)
        self.mixers = nn.Sequential(Mixer(), Mixer())
        self.out = nn.Linear(dim, classes)

    def forward(self, x):
        return self.out(self.mixers(self.embed(x)).mean(1))


def gestures(n, shapes):
    label = torch.randint(len(shapes), (n,))
    return shapes[label] + torch.randn(n, 8, 12), label


def main():
    torch.manual_seed(21101)
    shapes = torch.randn(4, 8, 12)
    model = Classifier().to(torch.bfloat16)
    weights = MasterWeights(model, lambda p: torch.optim.AdamW(p, lr=4e-4, weight_decay=0.01))
    for step in range(70):
        x, label = gestures(48, shapes)
        logits = model(x.to(torch.bfloat16)).to(torch.float32)
        loss = nn.functional.cross_entropy(logits, label)
        loss.backward()
        weights.step()
        if step % 2 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
