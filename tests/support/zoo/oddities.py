"""Loops unlike the usual one: closures, hand-written scaling, exceptions on the way."""

from __future__ import annotations

import contextlib
import copy
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.zoo import Trained, fit, specimen


def _small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def _loss(model: nn.Module) -> Tensor:
    return model(torch.randn(8, 8)).square().mean()


@specimen
def lbfgs() -> Trained:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 1), torch.randn(32, 4)
    y = x @ torch.randn(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    return Trained([optimizer.step(closure).item() for _ in range(3)], [model])


@specimen
def lazy_modules() -> Trained:
    """Parameters that have no shape before the first call, which is the first training step."""
    torch.manual_seed(7)
    model, losses = nn.Sequential(nn.LazyConv1d(4, 3), nn.LazyBatchNorm1d(), nn.Flatten(), nn.LazyLinear(1)), []
    optimizer = None
    for _ in range(3):
        loss = model(torch.randn(4, 2, 8)).square().mean()
        optimizer = optimizer or torch.optim.AdamW(model.parameters(), 1e-2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, [model])


@specimen
def closure_adam() -> Trained:
    """Forward and backward inside ``optimizer.step``, as Lightning does it."""
    torch.manual_seed(1)
    model = _small()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = _loss(model)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        return loss

    return Trained([optimizer.step(closure).item() for _ in range(3)], [model])


class _SignSGD(torch.optim.Optimizer):
    """Gives the gradients back to the allocator as it goes along."""

    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                grad, parameter.grad = parameter.grad, None
                parameter.sub_(grad.sign(), alpha=group["lr"])


@specimen
def cleared_in_step() -> Trained:
    torch.manual_seed(8)
    model, losses = _small(), []
    optimizer = _SignSGD(model.parameters())
    for _ in range(3):
        loss = _loss(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, [model])


@specimen
def inner_loop() -> Trained:
    """A module whose weights are the results of an inner step (MAML); warnings about leaves count as losses."""
    torch.manual_seed(9)
    model, losses = nn.Linear(8, 1), []
    fast, optimizer = copy.deepcopy(model), torch.optim.SGD(model.parameters(), 1e-2)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            grads = torch.autograd.grad(_loss(model), list(model.parameters()), create_graph=True)
            for (name, weight), grad in zip(model.named_parameters(), grads, strict=True):
                fast._parameters[name] = weight - 0.1 * grad
            loss = _loss(fast)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses += [loss.item(), float(sum("not a leaf" in str(w.message) for w in seen))]
    return Trained(losses, [model])


@specimen
def hand_scaled() -> Trained:
    """A constant loss scale, taken out by hand."""
    torch.manual_seed(2)
    model, losses = _small(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        loss = _loss(model)
        optimizer.zero_grad()
        (loss * 65536).backward()
        for p in model.parameters():
            p.grad /= 65536
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, [model])


@specimen
def weighted_loss() -> Trained:
    """Factors at the root of the backward pass that are no loss scale, and a clip that shrinks the gradient a lot."""
    torch.manual_seed(3)
    model, losses = _small(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for factor in (0.1, 2.0, 100.0, 1 / 3):
        optimizer.zero_grad()
        for _ in range(2):
            loss = _loss(model) / 2
            (loss * factor).backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
    return Trained(losses, [model])


class Picky(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > -100:
            raise ValueError("not this one")
        return x


@specimen
def caught_exception() -> Trained:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    broken = nn.Sequential(model, Picky())

    def loss() -> Tensor:
        with contextlib.suppress(ValueError):
            broken(torch.randn(2, 4))
        return model(torch.randn(2, 4)).sum()

    return Trained(fit(model, torch.optim.SGD(model.parameters(), 0.1), loss), [model])


class Late(nn.Module):
    """Gets an adapter after its first step, as fine-tuning libraries do it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x)


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@specimen
def late_adapter() -> Trained:
    torch.manual_seed(5)
    model = Late()

    def loss() -> Tensor:
        return model(torch.randn(4, 8)).square().mean()

    losses = fit(model, torch.optim.AdamW(model.parameters(), 1e-3), loss, steps=1)
    model.base = Adapter(model.base)
    trainable = [p for p in model.parameters() if p.requires_grad]
    return Trained(losses + fit(model, torch.optim.AdamW(trainable, 1e-2), loss, steps=3), [model])


@specimen
def no_optimizer() -> Trained:
    """Weights updated by hand, gradients accumulated over two passes, the gradients cleared before the forward pass."""
    torch.manual_seed(7)
    model, losses = _small(), []
    for _ in range(4):
        model.zero_grad()
        total = 0.0
        for _ in range(2):
            loss = _loss(model) / 2
            loss.backward()
            total += loss.item()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        losses.append(total)
    return Trained(losses, [model])
