"""Kanji radicals with an auxiliary classifier; its weight is annealed from 0.4 to zero over the first half."""

import torch
import torch.nn.functional as F

from blocks import SmallInception

torch.manual_seed(23)
CLASSES, S = 10, 12
strokes = F.interpolate((torch.rand(CLASSES, 1, 6, 6) > 0.55).float(), S)


def radicals(n):
    y = torch.randint(CLASSES, (n,))
    x = torch.stack([torch.roll(strokes[k], tuple(torch.randint(-1, 2, (2,)).tolist()), (1, 2)) for k in y])
    return x + 0.4 * torch.randn(n, 1, S, S), y


class Runner:
    steps = 360

    def __init__(self):
        self.model = SmallInception(CLASSES)
        self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=1e-3, alpha=0.9, eps=1e-6)

    def aux_weight(self, step):
        return max(0.0, 0.4 * (1 - 2 * step / self.steps))

    def train(self):
        for step in range(self.steps):
            x, y = radicals(32)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                main, aux = self.model(x)
            main_loss = F.cross_entropy(main.float(), y)
            total = main_loss + self.aux_weight(step) * F.cross_entropy(aux.float(), y)
            self.optimizer.zero_grad()
            total.backward()
            self.optimizer.step()
            if step % 6 == 0:
                print(f"step {step} aux weight {self.aux_weight(step):.3f} loss {main_loss.item():.4f}")


Runner().train()
