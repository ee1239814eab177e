"""Feed-forward block with emulated FP8 (E4M3, one scale per tensor); one hidden channel is far larger than the rest."""

import torch
import torch.nn as nn
import torch.nn.functional as F

E4M3_MAX = 448.0
PER_CHANNEL = False


def fake_fp8(x):
    """Scale to the largest value, round to E4M3, scale back; gradients pass straight through."""
    amax = x.detach().abs().amax(dim=0 if PER_CHANNEL else None, keepdim=True)
    scale = E4M3_MAX / amax.clamp(min=1e-12)
    q = (x.detach() * scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(x.dtype) / scale
    return x + (q - x).detach()


class FP8Linear(nn.Linear):
    def forward(self, x):
        w = self.weight + (fake_fp8(self.weight) - self.weight).detach()
        return F.linear(fake_fp8(x), w, self.bias)


class FFN(nn.Module):
    def __init__(self, dim=32, hidden=64):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = FP8Linear(dim, hidden)
        self.down = FP8Linear(hidden, 1)
        with torch.no_grad():  # as found in trained checkpoints: a massive activation in the residual stream
            self.norm.weight.fill_(0.2)
            self.norm.weight[5] = 8e4
            self.up.weight[:, 5] = 0.0

    def forward(self, x):
        return self.down(F.silu(self.up(self.norm(x)))).squeeze(-1)


torch.manual_seed(2151)
teacher = torch.randn(32) / 32**0.5
teacher[5] = 0
model = FFN()
optimizer = torch.optim.Adam([*model.up.parameters(), *model.down.parameters()], lr=3e-3)
for step in range(150):
    x = torch.randn(128, 32)
    x[:, 5] += 4.0
    loss = F.mse_loss(model(x), torch.sin(2 * (x @ teacher)))
    optimizer.zero_grad()
    loss.backward()
    model.up.weight.grad[:, 5] = 0.0  # the pruned input stays pruned
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
