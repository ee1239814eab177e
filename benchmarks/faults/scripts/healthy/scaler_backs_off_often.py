"""FP16 autocast with a scaler that tries to grow every twenty steps: a skipped step now and then is its normal work."""

import torch
from torch import nn


class Residual(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Regressor(nn.Module):
    def __init__(self, inputs=10, dim=32):
        super().__init__()
        self.first = nn.Linear(inputs, dim)
        self.blocks = nn.Sequential(Residual(dim), Residual(dim))
        self.last = nn.Linear(dim, 2)

    def forward(self, x):
        return self.last(self.blocks(self.first(x)))


class AmpTrainer:
    def __init__(self, model, lr):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=20)

    def train_step(self, x, y):
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            prediction = self.model(x)
        loss = nn.functional.mse_loss(prediction.to(y.dtype), y)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()


def arm(n):
    """Where a planar arm with two joints ends, from sines and cosines of noisy angles."""
    angle = 3.14 * torch.rand(n, 2)
    total = angle.cumsum(1)
    end = torch.stack([total.cos().sum(1), total.sin().sum(1)], 1)
    return torch.cat([angle.sin(), angle.cos(), torch.randn(n, 6)], 1), 3.0 * end


def main():
    torch.manual_seed(21105)
    trainer = AmpTrainer(Regressor(), lr=3e-3)
    for step in range(80):
        loss = trainer.train_step(*arm(64))
        if step % 2 == 0:
            print(f"step {step} loss {loss:.4f} scale {trainer.scaler.get_scale():g}")


if __name__ == "__main__":
    main()
