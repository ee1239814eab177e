"""Intent classification, weights and Adam's state in bfloat16: an optimizer that keeps everything in the weight's dtype."""

import torch
from torch import nn
from torch.optim import Optimizer


class LowPrecisionAdam(Optimizer):
    """Adam without any FP32 state: hyperparameters become tensors of the weight's dtype, so that nothing is promoted."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                beta1, beta2 = (torch.tensor(b, dtype=p.dtype) for b in group["betas"])
                if len(state) == 0:
                    state["step"] = torch.zeros((), dtype=p.dtype)
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                state["m"] = torch.lerp(p.grad, state["m"], beta1)
                state["v"] = torch.lerp(p.grad * p.grad, state["v"], beta2)
                m_hat = state["m"] / (1 - beta1 ** state["step"])
                v_hat = state["v"] / (1 - beta2 ** state["step"])
                p.sub_(group["lr"] * m_hat / (v_hat.sqrt() + group["eps"]))
        return loss


class IntentNet(nn.Module):
    def __init__(self, vocab=80, width=16, intents=5):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.mix = nn.Linear(width, width)
        self.classify = nn.Linear(width, intents)

    def forward(self, tokens):
        return self.classify(torch.tanh(self.mix(self.embed(tokens).mean(1))))


def queries(n):
    intent = torch.randint(5, (n,))
    tokens = torch.randint(80, (n, 6))
    tokens[:, :3] = intent[:, None] * 16 + torch.randint(0, 8, (n, 3))
    return tokens, intent


def main():
    torch.manual_seed(28)
    model = IntentNet().to(torch.bfloat16)
    optimizer = LowPrecisionAdam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
    criterion = nn.CrossEntropyLoss()
    for step in range(24):
        tokens, intent = queries(16)
        optimizer.zero_grad()
        loss = criterion(model(tokens).float(), intent)
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 4 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
