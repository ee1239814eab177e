"""An autoencoder of good cloth; what it cannot draw is a flaw in the weave."""

import argparse

import torch
from data import loader
from model import WeaveAutoencoder
from trainer import Trainer


def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--lr-step", type=int, default=4, help="epochs until the rate falls by the factor")
    parser.add_argument("--lr-gamma", type=float, default=0.8)
    return parser.parse_args()


if __name__ == "__main__":
    opt = options()
    torch.manual_seed(111)
    model = WeaveAutoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=opt.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, opt.lr_step, opt.lr_gamma)
    trainer = Trainer(model, optimizer, scheduler, loader())
    trainer.fit(opt.epochs)
