"""Skip-grams with negative samples: sparse gradients, most rows of both tables rest in each step."""

import torch
import torch.nn.functional as F
from torch import nn

WORDS, WIDTH = 300, 16


class SkipGram(nn.Module):
    def __init__(self):
        super().__init__()
        self.centre, self.context = nn.Embedding(WORDS, WIDTH, sparse=True), nn.Embedding(WORDS, WIDTH, sparse=True)
        nn.init.uniform_(self.centre.weight, -0.3, 0.3)
        nn.init.zeros_(self.context.weight)

    def forward(self, centre, near, far):
        c = self.centre(centre)
        good = (c * self.context(near)).sum(-1)
        bad = torch.einsum("bd,bnd->bn", c, self.context(far))
        return -F.logsigmoid(good).mean() - F.logsigmoid(-bad).sum(1).mean()


def pairs(n):
    centre = torch.randint(0, WORDS, (n,))
    near = (centre // 30 * 30 + torch.randint(0, 30, (n,))) % WORDS
    return centre, near, torch.randint(0, WORDS, (n, 3))


def main():
    torch.manual_seed(3211)
    model = SkipGram()
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.03)
    for step in range(80):
        loss = model(*pairs(128))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 8 == 0:
            print(f"step {step} loss {loss.item():.4f}")


main()
