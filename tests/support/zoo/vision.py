"""Image models: BatchNorm, in-place ReLU, dropout, SGD in all its variants."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.zoo import Trained, specimen
from tests.support.zoo.oracle import Oracle


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(8 * 9, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x))


@specimen
def cnn() -> Trained:
    torch.manual_seed(0)
    model, losses = CNN(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
    oracle = Oracle(model, step=2)
    criterion = nn.CrossEntropyLoss()
    for _ in range(4):
        loss = criterion(model(torch.randn(4, 3, 8, 8)), torch.randint(0, 10, (4,)))
        optimizer.zero_grad()
        loss.backward()
        oracle.accumulated()
        oracle.about_to_step()
        optimizer.step()
        oracle.stepped()
        losses.append(loss.item())
    return Trained(losses, [model])


@specimen
def evaluations() -> Trained:
    """A look at the validation set before training and after each step, with the same loss module."""
    torch.manual_seed(1)
    model, losses = CNN(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, amsgrad=True)
    criterion = nn.MSELoss()

    def validate() -> float:
        model.eval()
        with torch.inference_mode():
            total = sum(criterion(model(torch.randn(4, 3, 8, 8)) + 1e6, torch.zeros(4, 10)).item() for _ in range(3))
        model.train()
        return total

    losses.append(validate())
    for _ in range(3):
        optimizer.zero_grad()
        loss = criterion(model(torch.randn(4, 3, 8, 8)), torch.zeros(4, 10))
        loss.backward()
        optimizer.step()
        losses += [loss.item(), validate()]
    return Trained(losses, [model])


@specimen
def submodules() -> Trained:
    """Parts of a model called one by one, a loss module made anew in each step."""
    torch.manual_seed(2)
    model, losses = CNN(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        features = model.stem(torch.randn(2, 3, 8, 8))
        loss = nn.MSELoss()(model.head(features.square() + 3.0), torch.zeros(2, 10))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            losses.append(nn.MSELoss()(model.head(features), torch.full((2, 10), 1e6)).item())
        losses.append(loss.item())
    return Trained(losses, [model])


@specimen
def functional_loss() -> Trained:
    """torch.func inside a loss: per-sample gradients, a Jacobian."""
    torch.manual_seed(3)
    model, losses = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        x = torch.randn(5, 4)
        weights = {name: p.detach() for name, p in model.named_parameters()}

        def one(weights: dict[str, Tensor], row: Tensor) -> Tensor:
            return torch.func.functional_call(model, weights, (row,)).square().mean()

        per_sample = torch.func.vmap(torch.func.grad(one), (None, 0))(weights, x)
        jacobian = torch.func.vmap(torch.func.jacrev(model))(x)
        penalty = sum(g.square().sum() for g in per_sample.values()) + jacobian.square().sum()
        loss = F.mse_loss(model(x), torch.zeros(5, 3)) + penalty.detach() * model[0].weight.square().mean()
        batched = torch.autograd.grad(model(x), model[2].weight, torch.eye(15).view(15, 5, 3), is_grads_batched=True)
        optimizer.zero_grad()
        (loss + batched[0].square().mean()).backward()
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, [model])
