"""Tunes only gains and biases (FP32) of a frozen BF16 encoder with a very small rate of change per step."""

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, DIM = 200, 48


class Adapted(nn.Module):
    """A frozen linear layer with a gain and a bias that are trained."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear
        self.gain = nn.Parameter(torch.ones(linear.out_features))
        self.shift = nn.Parameter(torch.zeros(linear.out_features))

    def forward(self, x):
        y = self.linear(x.to(self.linear.weight.dtype))
        return y.float() * self.gain + self.shift


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, DIM)
        self.fc1, self.fc2, self.head = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM), nn.Linear(DIM, 5)

    def forward(self, ids):
        x = self.words(ids).mean(1)
        return self.head(F.gelu(self.fc2(F.gelu(self.fc1(x)))))


def reviews(n, topics, ids=10):
    label = torch.randint(5, (n,))
    return torch.multinomial(topics[label], ids, replacement=True), label


torch.manual_seed(303)
topics = torch.distributions.Dirichlet(torch.full((5, VOCAB), 0.1)).sample()
other = 0.6 * topics + 0.4 * topics.roll(1, 0)
net = Classifier()
pretraining = torch.optim.Adam(net.parameters(), lr=3e-3)
for _ in range(60):
    ids, label = reviews(64, topics)
    F.cross_entropy(net(ids), label).backward()
    pretraining.step()
    pretraining.zero_grad()

net.requires_grad_(False).to(torch.bfloat16)
for name in ("fc1", "fc2", "head"):
    setattr(net, name, Adapted(getattr(net, name)))
trainable = [p for p in net.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trainable, lr=2e-3, weight_decay=0.0)
for step in range(200):
    ids, label = reviews(64, other)
    loss = F.cross_entropy(net(ids), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 0:
        print(f"step {step} loss {loss.item():.4f}")
