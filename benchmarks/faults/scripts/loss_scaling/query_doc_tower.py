"""Two-tower retrieval with in-batch negatives, in a small trainer with a callback that logs the gradient norm."""

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, LENGTH, DIM = 300, 12, 48
torch.manual_seed(404)
topics = torch.randint(VOCAB, (40, 30))


def pairs(n):
    topic = torch.randint(40, (n,))
    pick = lambda: topics[topic].gather(1, torch.randint(30, (n, LENGTH)))  # noqa: E731
    return pick(), pick()


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, DIM)
        self.net = nn.Sequential(nn.Linear(DIM, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, DIM))

    def forward(self, ids):
        return F.normalize(self.net(self.words(ids).mean(1)).float(), dim=-1)


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.doc = Tower(), Tower()

    def forward(self, q, d):
        return self.query(q) @ self.doc(d).T / 0.1


class Trainer:
    def __init__(self, model, lr=0.5):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.callbacks = []

    def train_step(self, q, d):
        with torch.autocast("cpu", dtype=torch.float16):
            logits = self.model(q, d)
            loss = F.cross_entropy(logits.float(), torch.arange(len(q)))
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        for callback in self.callbacks:
            callback(self)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()


class GradNorm:
    """Keeps the norm of the gradients in their true size."""

    def __init__(self):
        self.history = []

    def __call__(self, trainer):
        inverse = 1.0 / trainer.scaler.get_scale()
        grads = [p.grad.mul_(inverse) for p in trainer.model.parameters()]
        self.history.append(torch.stack([g.norm() for g in grads]).norm().item())


trainer = Trainer(TwoTower())
trainer.callbacks.append(GradNorm())
for step in range(120):
    loss = trainer.train_step(*pairs(48))
    if step % 4 == 3:
        print(f"step {step} loss {loss:.4f} |g| {trainer.callbacks[0].history[-1]:.3f}")
