"""A diffusion model of sea-ice profiles. The averaged weights are what is sampled from, and what is evaluated."""

import argparse

import torch
from diffusion import profiles, v_loss
from ema import ModelEma
from model import Denoiser

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=450)
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--ema-decay", type=float, default=0.992)
parser.add_argument("--ema-dtype", default="bfloat16")


def held_out():
    g = torch.Generator().manual_seed(8)
    return profiles(512, g), torch.rand(512, generator=g) * 0.98 + 0.01, torch.randn(512, 40, generator=g)


if __name__ == "__main__":
    args = parser.parse_args()
    torch.manual_seed(6)
    g = torch.Generator().manual_seed(7)
    net = Denoiser()
    ema = ModelEma(net, args.ema_decay, getattr(torch, args.ema_dtype))
    start = [p.detach().clone() for p in net.parameters()]
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr, betas=(0.9, 0.99), weight_decay=0.01)
    test = held_out()
    for step in range(args.steps):
        x = profiles(args.batch_size, g)
        t = torch.rand(args.batch_size, generator=g) * 0.98 + 0.01
        loss = v_loss(net, x, t, torch.randn(x.shape, generator=g))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        ema.update(net)
        if step % 15 == 14:
            with torch.no_grad():
                print(f"step {step + 1} raw {v_loss(net, *test):.4f} loss {v_loss(ema.module, *test):.4f}")
