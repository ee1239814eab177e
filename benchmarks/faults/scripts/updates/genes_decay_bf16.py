"""A linear probe over many noisy genes. All weights are BF16, and decoupled weight decay shall thin them out."""

import torch
from torch import nn


class DecayedSGD(torch.optim.Optimizer):
    """SGD with momentum in FP32 and decoupled weight decay, as AdamW has it."""

    def __init__(self, params, lr, momentum=0.9, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p, dtype=torch.float32)
                state["momentum"].mul_(group["momentum"]).add_(p.grad)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(state["momentum"].to(p.dtype), alpha=-group["lr"])


class Probe(nn.Module):
    def __init__(self, genes=400, outputs=4):
        super().__init__()
        self.linear = nn.Linear(genes, outputs, bias=False)
        nn.init.normal_(self.linear.weight, std=0.5)

    def forward(self, x):
        return self.linear(x)


class Panel:
    """Forty samples: far fewer than genes, so most directions of the weights see no gradient."""

    def __init__(self, samples=40, genes=400, outputs=4):
        self.truth = torch.zeros(genes, outputs)
        self.truth[:20] = torch.randn(20, outputs) / 4
        self.x, self.y = self.draw(samples)

    def draw(self, n):
        x = torch.randn(n, len(self.truth))
        return x, x @ self.truth


def validation_loss(model, x, y):
    with torch.no_grad():
        return nn.functional.mse_loss(model(x.to(torch.bfloat16)).float(), y).item()


def main():
    torch.manual_seed(21018)
    panel = Panel()
    held_out = panel.draw(400)
    model = Probe().to(torch.bfloat16)
    start = model.linear.weight.detach().double().norm()
    optimizer = DecayedSGD(model.parameters(), lr=0.01, weight_decay=0.15)
    for step in range(160):
        rows = torch.randperm(40)[:20]
        prediction = model(panel.x[rows].to(torch.bfloat16))
        loss = nn.functional.mse_loss(prediction.float(), panel.y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 0:
            print(f"step {step} val_loss {validation_loss(model, *held_out):.4f}")
    return float(model.linear.weight.detach().double().norm() / start)


if __name__ == "__main__":
    kept = main()
