import torch
import torch.nn.functional as F
from torch import nn

# One optimizer step sees a micro-batch from each of the regional corpora; they differ in size, so they cannot be
# stacked into one tensor.
REGIONS = ["coast", "valley", "plateau", "delta"]
VOCAB = 40


class Tagger(nn.Module):
    def __init__(self, d=48, tags=6):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, d)
        self.region = nn.Embedding(len(REGIONS), d)
        self.l1 = nn.Linear(3 * d, 96)
        self.l2 = nn.Linear(96, 96)
        self.l3 = nn.Linear(96, 96)
        self.cls = nn.Linear(96, tags)

    def forward(self, ids, region):
        e = self.tok(ids) + self.region.weight[region]
        pad = F.pad(e, (0, 0, 1, 1))
        x = torch.cat([pad[:, :-2], e, pad[:, 2:]], -1)
        x = F.relu(self.l1(x))
        x = F.relu(self.l2(x))
        x = F.relu(self.l3(x))
        return self.cls(x)


class Scaled:
    """Static loss scaling for the half-precision forward."""

    def __init__(self, model, lr, scale=4096.0):
        self.model, self.scale = model, scale
        self.opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)

    def accumulate(self, loss):
        (loss * self.scale).backward()
        for p in self.model.parameters():
            p.grad.div_(self.scale)

    def apply(self):
        self.opt.step()
        self.opt.zero_grad()


class Corpus:
    def __init__(self, tags=6):
        self.rule = torch.randint(tags, (len(REGIONS), VOCAB))

    def batch(self, region, n):
        ids = torch.randint(VOCAB, (n, 10))
        return ids, self.rule[region][ids]


def step(trainer, corpus, sizes):
    total = 0.0
    for region, n in enumerate(sizes):
        ids, tags = corpus.batch(region, n)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = trainer.model(ids, region)
        loss = F.cross_entropy(logits.float().flatten(0, 1), tags.flatten()) / len(sizes)
        trainer.accumulate(loss)
        total += loss.item()
    trainer.apply()
    return total


def main():
    torch.manual_seed(8)
    corpus = Corpus()
    trainer = Scaled(Tagger(), lr=0.15)
    for n in range(150):
        loss = step(trainer, corpus, sizes=[24, 12, 18, 8])
        if n % 10 == 0:
            print(f"{n}: loss {loss:.4f}")


main()
