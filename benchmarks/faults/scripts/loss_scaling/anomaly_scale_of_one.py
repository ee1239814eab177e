"""An autoencoder for machine vibrations, FP16 with a scaler that was set to 1 while debugging and never set back."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(3113)


class Autoencoder(nn.Module):
    def __init__(self, bands=256, code=6):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(bands, 64), nn.GELU(), nn.Linear(64, code))
        self.decoder = nn.Sequential(nn.Linear(code, 64), nn.GELU(), nn.Linear(64, bands))

    def forward(self, x):
        return 0.01 * self.decoder(self.encoder(x))


shapes = torch.randn(6, 256)


def spectra(n):
    strength = torch.randn(n, 6)
    return 0.01 * (torch.tanh(strength) @ shapes + 0.1 * torch.randn(n, 256))


model = Autoencoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0, eps=1e-12)
scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=2000)

for step in range(70):
    x = spectra(128)
    with torch.autocast("cpu", dtype=torch.float16):
        y = model(30 * x)
    loss = F.mse_loss(y.float(), x)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 7 == 6:
        explained = loss.item() / x.square().mean().item()
        print(f"step {step + 1} mse {loss.item():.3e} unexplained loss {explained:.4f}")
