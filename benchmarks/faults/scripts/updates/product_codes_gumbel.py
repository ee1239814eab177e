"""Learns discrete product codes with a Gumbel-softmax autoencoder whose temperature is annealed."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


class GumbelCoder(nn.Module):
    def __init__(self, features, groups=6, choices=8, hidden=64):
        super().__init__()
        self.groups, self.choices = groups, choices
        self.logits = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, groups * choices))
        self.books = nn.Parameter(0.3 * torch.randn(groups, choices, features))
        self.register_buffer("temperature", torch.tensor(1.0))

    def forward(self, x):
        logits = self.logits(x).view(-1, self.groups, self.choices)
        if self.training:
            u = torch.rand_like(logits.float()).clamp(1e-6, 1 - 1e-6)
            noisy = logits - (-u.log()).log()
            codes = F.softmax(noisy.float() / self.temperature.float(), -1)
        else:
            codes = F.one_hot(logits.argmax(-1), self.choices).float()
        return torch.einsum("bgc,gcf->bf", codes, self.books.float())

    @torch.no_grad()
    def anneal(self, rate):
        self.temperature.mul_(rate).clamp_(min=0.1)


def catalogue(n=2048, features=24):
    parts = torch.randn(6, 8, features)
    return sum(parts[g, torch.randint(8, (n,))] for g in range(6)) / 6**0.5


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=750)
    parser.add_argument("--anneal", type=float, default=0.9982)
    args = parser.parse_args([])
    torch.manual_seed(61)
    data = catalogue()
    model = GumbelCoder(data.shape[1])
    for name, buffer in model.named_buffers():
        setattr(model, name, buffer.to(torch.bfloat16))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(args.steps):
        x = data[torch.randint(len(data), (64,))]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        F.mse_loss(out.float(), x).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.anneal(args.anneal)
        if step % 20 == 19:
            model.eval()
            with torch.no_grad():
                print(f"step {step + 1} held loss {F.mse_loss(model(data[:512]), data[:512]).item():.4f}")
            model.train()
    return model


model = main()
