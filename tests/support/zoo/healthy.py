"""Runs with nothing wrong, full of what a careless rule would take for it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.zoo import Trained, fit, specimen


class Net(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.fc1, self.fc2, self.out = nn.Linear(16, width), nn.Linear(width, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.fc2(self.fc1(x).relu()).relu())


def _classify(model: nn.Module):
    return lambda: F.cross_entropy(model(torch.randn(16, 16)), torch.randint(0, 4, (16,)))


@specimen
def fresh_scaler() -> Trained:
    """A scale that starts far too high comes down by itself."""
    torch.manual_seed(0)
    model = Net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    return Trained(fit(model, optimizer, _classify(model), scaler=scaler, autocast=torch.float16, steps=40), [model])


@specimen
def dead_units() -> Trained:
    """Most units of a ReLU layer never fire, and dropout removes half of the rest."""
    torch.manual_seed(1)
    model = Net()
    with torch.no_grad():
        model.fc1.bias[:28] = -50.0
    drop = nn.Dropout(0.5)

    def loss() -> Tensor:
        x, y = torch.randn(16, 16), torch.randint(0, 4, (16,))
        return F.cross_entropy(model.out(drop(model.fc2(model.fc1(x).relu()).relu())), y)

    return Trained(fit(model, torch.optim.SGD(model.parameters(), 0.05), loss, steps=12), [model])


@specimen
def warm_up() -> Trained:
    """The learning rate starts from zero: the first step changes nothing, on purpose; gradients are clipped."""
    torch.manual_seed(2)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
    return Trained(fit(model, optimizer, _classify(model), scheduler=scheduler, clip=0.5, steps=16), [model])


@specimen
def sparse_rows() -> Trained:
    """Most rows of two embeddings are never looked up; one has sparse gradients, the other a padding row."""
    torch.manual_seed(3)
    sparse, dense = nn.Embedding(500, 8, sparse=True), nn.Embedding(500, 8, padding_idx=0)
    head = nn.Linear(16, 4)
    model = nn.ModuleList([sparse, dense, head])

    def loss() -> Tensor:
        tokens = torch.randint(0, 20, (8, 5))
        return F.cross_entropy(head(torch.cat([sparse(tokens), dense(tokens)], -1).mean(1)), torch.randint(0, 4, (8,)))

    return Trained(fit(model, torch.optim.SGD(model.parameters(), 0.1), loss, steps=12), [model])


@specimen
def zero_initialised() -> Trained:
    """A zero output layer and a low-rank adapter: gradients of what lies before are exactly zero at first."""
    torch.manual_seed(4)
    model = Net()
    nn.init.zeros_(model.out.weight)
    nn.init.zeros_(model.out.bias)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0)
    return Trained(fit(model, optimizer, _classify(model), steps=12, autocast=torch.bfloat16), [model])


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16, padding_idx=0)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.out = nn.Linear(16, 5)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
        y, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=tokens.shape[1])
        return self.out(y)


@specimen
def padded() -> Trained:
    """Padded sequences: most positions are zeros and take no part in the loss."""
    torch.manual_seed(5)
    model = Tagger()

    def loss() -> Tensor:
        lengths = torch.randint(1, 5, (6,))
        alive = torch.arange(20)[None] < lengths[:, None]
        tokens = torch.randint(1, 50, (6, 20)) * alive
        labels = torch.randint(0, 5, (6, 20)).masked_fill(~alive, -100)
        return F.cross_entropy(model(tokens, lengths).flatten(0, 1), labels.flatten(), ignore_index=-100)

    return Trained(fit(model, torch.optim.Adam(model.parameters(), 1e-3), loss, steps=12), [model])
