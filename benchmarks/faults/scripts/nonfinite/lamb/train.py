"""Image captions: CNN features into a GRU decoder, LAMB; the adapter joins in after a warm-up."""

import torch
from lamb import Lamb
from torch import nn
from torch.nn import functional as F


class Adapter(nn.Module):
    """Starts as the identity, and stays so until it is switched on."""

    def __init__(self, dim):
        super().__init__()
        self.down = nn.Linear(dim, 4)
        self.up = nn.Linear(4, dim, bias=False)
        nn.init.zeros_(self.up.weight)
        self.strength = 0.0

    def forward(self, x):
        return x + self.strength * self.up(torch.relu(self.down(x)))


class Captioner(nn.Module):
    def __init__(self, vocab=30, dim=24):
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, dim, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
        )
        self.adapter = Adapter(dim)
        self.words = nn.Embedding(vocab, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, images, words):
        state = self.adapter(self.cnn(images).flatten(1))
        return self.out(self.gru(self.words(words), state.unsqueeze(0))[0])


def train(steps=10, warmup=4):
    torch.manual_seed(0)
    model = Captioner()
    base = [p for name, p in model.named_parameters() if "adapter" not in name]
    optimizer = Lamb(base, lr=5e-3)
    for step in range(steps):
        if step == warmup:
            optimizer.add_param_group({"params": model.adapter.parameters()})
        if step == warmup + 2:
            model.adapter.strength = 0.1
        label = torch.randint(5, (8,))
        images = label.view(-1, 1, 1, 1) / 5 + 0.1 * torch.randn(8, 3, 16, 16)
        words = (label[:, None] * 6 + torch.arange(7)) % 30
        loss = F.cross_entropy(model(images, words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        print(step, loss.item())


train()
