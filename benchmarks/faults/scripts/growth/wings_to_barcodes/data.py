import torch


class Insects:
    """Pairs of a wing's picture (16 x 16) and 32 bases; both depend on the place in a tree of species."""

    def __init__(self, seed=0, traits=6):
        g = torch.Generator().manual_seed(seed)
        self.to_wing = torch.randn(traits, 256, generator=g)
        self.to_bases = torch.randn(traits, 32 * 4, generator=g)
        self.traits = traits

    def pairs(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        z = torch.randn(n, self.traits, generator=g)
        wing = torch.tanh(z @ self.to_wing / 2) + 0.7 * torch.randn(n, 256, generator=g)
        logits = (z @ self.to_bases).view(n, 32, 4) + 0.7 * torch.randn(n, 32, 4, generator=g)
        return wing.view(n, 1, 16, 16), logits.argmax(2)
