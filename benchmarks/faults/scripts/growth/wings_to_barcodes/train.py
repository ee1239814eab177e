"""Finds the barcode that belongs to a wing: contrastive learning with a learnt temperature."""

import argparse

import torch
from data import Insects
from model import WingBarcode, symmetric_loss


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=320)
    p.add_argument("--batch-size", type=int, default=64)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--lr-scale", type=float, default=0.02, help="for the temperature, which has no weight decay")
    return p.parse_args()


def build_optimizer(model, args):
    towers = [p for n, p in model.named_parameters() if n != "log_scale"]
    return torch.optim.AdamW(
        [
            {"params": towers, "lr": args.lr, "weight_decay": 0.05},
            {"params": [model.log_scale], "lr": args.lr_scale, "weight_decay": 0.0},
        ]
    )


if __name__ == "__main__":
    args = get_args()
    torch.manual_seed(51)
    g = torch.Generator().manual_seed(52)
    insects = Insects()
    wings, barcodes = insects.pairs(512, seed=1)
    held_out = insects.pairs(128, seed=2)
    model = WingBarcode()
    optimizer = build_optimizer(model, args)
    for step in range(args.steps):
        chosen = torch.randperm(len(wings), generator=g)[: args.batch_size]
        train = symmetric_loss(model(wings[chosen], barcodes[chosen]))
        optimizer.zero_grad()
        train.backward()
        optimizer.step()
        if step % 10 == 9:
            model.eval()
            with torch.no_grad():
                loss = symmetric_loss(model(*held_out))
            model.train()
            print(
                f"step {step + 1} train {train.item():.4f} loss {loss.item():.4f} scale {model.log_scale.exp().item():.1f}"
            )
