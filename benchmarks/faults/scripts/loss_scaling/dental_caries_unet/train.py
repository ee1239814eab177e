"""Marks caries on bitewing crops. python train.py --epochs 5"""

import argparse

import torch
from dataset import Bitewings
from engine import train_step
from torch.utils.data import DataLoader
from unet import UNet


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--max-norm", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    args = get_args()
    torch.manual_seed(args.seed)
    shuffle = torch.Generator().manual_seed(args.seed)
    loader = DataLoader(Bitewings(160), args.batch_size, shuffle=True, generator=shuffle)
    model = UNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-5, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs, eta_min=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    for epoch in range(args.epochs):
        losses = [train_step(model, batch, optimizer, scaler, args.max_norm) for batch in loader]
        schedule.step()
        for at in range(0, len(losses), 5):
            print(f"epoch {epoch} batch {at} loss {sum(losses[at : at + 5]) / 5:.4f}")
