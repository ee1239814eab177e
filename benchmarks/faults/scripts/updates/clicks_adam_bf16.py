"""Poisson regression of click counts with an Adam that keeps both moments in BF16 to save memory."""

import math

import torch


class SmallAdam(torch.optim.Optimizer):
    """Adam with states of two bytes per weight."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.998), eps=1e-10, state_dtype=torch.bfloat16):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "state_dtype": state_dtype})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p, dtype=group["state_dtype"])
                    state["exp_avg_sq"] = torch.zeros_like(p, dtype=group["state_dtype"])
                state["step"] += 1
                m, v, g = state["exp_avg"], state["exp_avg_sq"], p.grad
                m.mul_(beta1).add_(g, alpha=1 - beta1)
                v.mul_(beta2).add_(g.square(), alpha=1 - beta2)
                size = group["lr"] * math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
                p.addcdiv_(m.to(p.dtype), v.to(p.dtype).sqrt().add_(group["eps"]), value=-size)


class Clicks(torch.nn.Module):
    def __init__(self, features):
        super().__init__()
        self.rate = torch.nn.Linear(features, 1)
        torch.nn.init.zeros_(self.rate.weight)
        torch.nn.init.constant_(self.rate.bias, 6.0)

    def forward(self, x):
        return self.rate(x).squeeze(1)


def impressions(n, weights):
    x = torch.randn(n, 24)
    rate = (x @ weights - 1.0).exp()
    clicks = (torch.rand(n, 40) < (rate / 40).clamp(max=1.0)[:, None]).sum(1)
    return x, clicks.to(x.dtype)


def poisson_loss(log_rate, clicks):
    return (log_rate.exp() - clicks * log_rate).mean()


def main():
    torch.manual_seed(21003)
    weights = 0.4 * torch.randn(24)
    x, clicks = impressions(2048, weights)
    model = Clicks(24)
    optimizer = SmallAdam(model.parameters(), lr=0.02)
    epochs, batches = 50, 14
    for epoch in range(epochs):
        total = 0.0
        for rows in torch.randperm(len(x)).split(-(-len(x) // batches)):
            loss = poisson_loss(model(x[rows]), clicks[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows)
        print(f"epoch {epoch} loss {total / len(x):.5f}")


if __name__ == "__main__":
    main()
