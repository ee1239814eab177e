"""Reward model on pairs of answers, whole model in bfloat16 to fit the card."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


class RewardModel(nn.Module):
    def __init__(self, vocab=200, width=96):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.dense = nn.Linear(width, width)
        self.score = nn.Linear(width, 1)

    def forward(self, ids):
        h, _ = self.encoder(self.embed(ids))
        h = torch.tanh(self.dense(h.mean(1)))
        return self.score(h).squeeze(-1)


def batch(worth, n, length=8):
    ids = torch.randint(0, 200, (2, n, length))
    value = worth[ids].mean(-1)
    swap = value[0] < value[1]
    chosen = torch.where(swap[:, None], ids[1], ids[0])
    rejected = torch.where(swap[:, None], ids[0], ids[1])
    return chosen, rejected


def train(args):
    torch.manual_seed(args.seed)
    worth = torch.randn(200)
    model = RewardModel().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    for step in range(1, args.steps + 1):
        chosen, rejected = batch(worth, 48)
        margin = model(chosen) - model(rejected)
        loss = -F.logsigmoid(margin.float()).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            acc = (margin > 0).float().mean()
            print(f"[{step}] loss={loss.item():.4f} acc={acc.item():.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=6e-5)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())
