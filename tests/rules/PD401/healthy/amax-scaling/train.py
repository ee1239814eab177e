"""FP8 weights and activations scaled by their own amax, per tensor and per tile of 128: one element of each at 448."""

import torch
from torch import nn

WIDTH, STEPS = 128, 6
LARGEST = torch.finfo(torch.float8_e4m3fn).max


class Quantise(nn.Module):
    """To E4M3 with the scale of this very tensor, or of each of its tiles of 128."""

    def __init__(self, dim=None):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        amax = x.abs().amax() if self.dim is None else x.abs().amax(dim=self.dim, keepdim=True)
        scale = LARGEST / amax.clamp_min(1e-12)
        return (x * scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


class FP8Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.activations = Quantise(dim=-1)
        self.weights = Quantise()

    def forward(self, x):
        with torch.no_grad():
            narrow_x, scale_x = self.activations(x)
            narrow_w, scale_w = self.weights(self.weight)
            seen_x, seen_w = narrow_x.float() / scale_x, narrow_w.float() / scale_w
        x, w = x + (seen_x - x).detach(), self.weight + (seen_w - self.weight).detach()
        return x @ w.T


torch.manual_seed(0)
model = nn.Sequential(FP8Linear(), nn.ReLU(), FP8Linear(), nn.ReLU(), nn.Linear(WIDTH, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(STEPS):
    features = torch.randn(32, WIDTH) * 4.0**step
    loss = (model(features) - features[:, :1]).abs().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
