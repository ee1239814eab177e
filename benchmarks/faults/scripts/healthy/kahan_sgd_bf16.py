"""SGD on BF16 weights with Kahan compensation: what an update loses is remembered and added the next time."""

import torch
from torch import nn


class KahanSGD(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p, dtype=torch.float32)
                    state["lost"] = torch.zeros_like(p)
                state["momentum"].mul_(group["momentum"]).add_(p.grad)
                update = state["lost"] - (group["lr"] * state["momentum"]).to(p.dtype)
                moved = p + update
                state["lost"].copy_(update - (moved - p))
                p.copy_(moved)


class Wine(nn.Module):
    def __init__(self, inputs=11):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(inputs, 48), nn.Linear(48, 48)
        self.norm = nn.LayerNorm(48)
        self.out = nn.Linear(48, 1)

    def forward(self, x):
        x = torch.relu(self.fc1(x))
        return self.out(self.norm(x + torch.relu(self.fc2(x)))).squeeze(1)


def bottles(n, mix):
    x = torch.randn(n, 11)
    return x, torch.tanh(x @ mix[0]) + 0.5 * x @ mix[1]


def evaluate(model, x, y):
    model.eval()
    with torch.no_grad():
        return nn.functional.mse_loss(model(x.to(torch.bfloat16)).to(torch.float32), y).item()


def main():
    torch.manual_seed(21102)
    mix = torch.randn(2, 11) / 2
    held_out = bottles(300, mix)
    model = Wine().to(torch.bfloat16)
    optimizer = KahanSGD(model.parameters(), lr=2e-3)
    for step in range(80):
        x, y = bottles(64, mix)
        model.train()
        prediction = model(x.to(torch.bfloat16))
        optimizer.zero_grad()
        nn.functional.mse_loss(prediction.to(torch.float32), y).backward()
        optimizer.step()
        if step % 4 == 0:
            print(f"step {step} val_loss {evaluate(model, *held_out):.4f}")


if __name__ == "__main__":
    main()
