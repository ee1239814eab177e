"""Trains the frame codec on quiet speech; float16 autocast halves the memory of the activations."""

import argparse

import torch
import torch.nn.functional as F

from codec import Codec
from data import clips

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=128)
parser.add_argument("--frames", type=int, default=8)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--seed", type=int, default=21)
args = parser.parse_args()

torch.manual_seed(args.seed)
generator = torch.Generator().manual_seed(args.seed)
train, val = clips(1024, args.frames, generator), clips(128, args.frames, generator)
codec = Codec()
optimizer = torch.optim.Adam(codec.parameters(), lr=args.lr)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

for step in range(args.steps):
    batch = train[torch.randint(len(train), (args.batch,))]
    with torch.autocast("cpu", dtype=torch.float16):
        decoded = codec(batch)
    loss = F.mse_loss(decoded.float(), batch)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 20 == 19:
        with torch.no_grad():
            error = F.mse_loss(codec(val), val)
        snr = 10 * (val.square().mean() / error).log10().item()
        print(f"step {step + 1} val loss {error.item():.3e} snr {snr:.1f} dB")
