"""A small GAN of stained-glass windows: hinge loss, two rates, an average of the generator."""

import copy

import torch
from data import panes
from networks import Discriminator, Generator
from torch.nn.functional import relu


class GanTrainer:
    def __init__(self, seed=131):
        torch.manual_seed(seed)
        self.g = torch.Generator().manual_seed(seed + 1)
        self.gen, self.disc = Generator(), Discriminator()
        self.slow = copy.deepcopy(self.gen).requires_grad_(False)
        self.gen_optimizer = torch.optim.Adam(self.gen.parameters(), lr=4e-4, betas=(0.0, 0.99))
        self.disc_optimizer = torch.optim.Adam(self.disc.parameters(), lr=1e-3, betas=(0.0, 0.99))

    def disc_step(self, real):
        with torch.no_grad():
            fake = self.gen(torch.randn(len(real), 16, generator=self.g))
        loss = relu(1 - self.disc(real)).mean() + relu(1 + self.disc(fake)).mean()
        self.disc_optimizer.zero_grad()
        loss.backward()
        self.disc_optimizer.step()
        return loss.item()

    def gen_step(self, n):
        self.disc.requires_grad_(False)
        loss = -self.disc(self.gen(torch.randn(n, 16, generator=self.g))).mean()
        self.gen_optimizer.zero_grad()
        loss.backward()
        self.gen_optimizer.step()
        self.disc.requires_grad_(True)
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.gen.parameters()):
                slow.lerp_(fast, 0.01)
        return loss.item()

    def fit(self, steps=300, batch=64):
        for step in range(steps):
            d = self.disc_step(panes(batch, self.g))
            v = self.gen_step(batch)
            if step % 10 == 0:
                print(f"step {step} generator loss {v:.4f} discriminator loss {d:.4f}")


if __name__ == "__main__":
    trainer = GanTrainer()
    trainer.fit()
