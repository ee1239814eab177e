"""A linear layer of 4096 inputs in FP8 with fast accumulation: features without a sign, weights with a mean of zero."""

import torch
from torch import nn

ROWS, INPUTS, OUTPUTS, STEPS = 16, 4096, 16, 4
E4M3 = torch.float8_e4m3fn


class FP8Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(OUTPUTS, INPUTS) / INPUTS**0.5)

    def forward(self, x):
        with torch.no_grad():
            scales = 448.0 / x.abs().amax(), 448.0 / self.weight.abs().amax()
            x8, weight8 = (x * scales[0]).to(E4M3), (self.weight * scales[1]).to(E4M3)
            seen = torch._scaled_mm(
                x8, weight8.T, 1 / scales[0], 1 / scales[1], out_dtype=torch.float32, use_fast_accum=True
            )
        exact = x @ self.weight.T
        return exact + (seen - exact).detach()  # straight-through gradient


torch.manual_seed(0)
model = nn.Sequential(FP8Linear(), nn.GELU(), nn.Linear(OUTPUTS, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
for step in range(STEPS):
    features, target = torch.randn(ROWS, INPUTS).relu(), torch.randn(ROWS, 1)
    loss = (model(features) - target).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
