"""Loops that leave steps out by themselves, and loops that throw gradients away for other reasons."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from tests.support.zoo import Trained, specimen

#: Attempts at which the gradients overflow.
OVERFLOWS = (0, 1, 4)


class Narrow(nn.Module):
    """Its hidden gradient passes through FP16, where a loss scale can make it overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x).half().float()))


def _loss(model: nn.Module) -> Tensor:
    return model(torch.randn(8, 8)).square().mean()


def _finite(model: nn.Module) -> bool:
    return all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def _by_hand(*, zero_late: bool) -> Trained:
    torch.manual_seed(11)
    model, losses = Narrow(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for attempt in range(6):
        scale = 2.0**40 if attempt in OVERFLOWS else 2.0**10
        loss = _loss(model)
        if zero_late:
            optimizer.zero_grad()
        (loss * scale).backward()
        if _finite(model):
            for p in model.parameters():
                p.grad /= scale
            optimizer.step()
        if not zero_late:
            optimizer.zero_grad()
        losses.append(loss.item())
    return Trained(losses, [model])


@specimen
def skips_by_hand() -> Trained:
    """Dynamic loss scaling without a scaler."""
    return _by_hand(zero_late=False)


@specimen
def skips_by_hand_zeroed_late() -> Trained:
    """The same, with gradients zeroed between forward and backward."""
    return _by_hand(zero_late=True)


def _under_scaler(*, attempts: int, models: int, zero_early: bool) -> Trained:
    torch.manual_seed(12)
    parts, losses = [Narrow() for _ in range(models)], []
    optimizers = [torch.optim.SGD(part.parameters(), 0.01) for part in parts]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for attempt in range(attempts):
        loss = sum(_loss(part) for part in parts) * (2.0**40 if attempt in OVERFLOWS else 1.0)
        scaler.scale(loss).backward()
        for part, optimizer in zip(parts, optimizers, strict=True):
            scaler.unscale_(optimizer)
            if torch.isfinite(nn.utils.clip_grad_norm_(part.parameters(), 1.0)):
                scaler.step(optimizer)
            if zero_early:
                optimizer.zero_grad()
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses.append(loss.item())
    return Trained(losses, parts)


@specimen
def skips_under_scaler() -> Trained:
    """``scaler.step`` is left out where the norm is not finite, ``scaler.update`` is not."""
    return _under_scaler(attempts=6, models=1, zero_early=False)


@specimen
def skips_under_scaler_zeroed_early() -> Trained:
    """The gradients are gone when ``scaler.update`` is called."""
    return _under_scaler(attempts=6, models=1, zero_early=True)


@specimen
def skips_two_optimizers() -> Trained:
    return _under_scaler(attempts=4, models=2, zero_early=False)


# --- steps that are none ----------------------------------------------------------------------------------------------


def _one_optimizer(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Narrow()
    return model, torch.optim.SGD(model.parameters(), 0.01)


@specimen
def gradient_surgery() -> Trained:
    """Gradients of two tasks by turns through one graph; those of one overflow, the first time, too."""
    model, optimizer = _one_optimizer(13)
    losses = []
    for step in range(3):
        hidden = model(torch.randn(8, 8))
        tasks = [hidden.square().mean() * (2.0**40 if step != 1 else 1.0), hidden.abs().mean()]
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for task in tasks:
            optimizer.zero_grad()
            task.backward(retain_graph=True)
            for total, p in zip(sums, model.parameters(), strict=True):
                total += torch.nan_to_num(p.grad, posinf=0.0, neginf=0.0)
        for total, p in zip(sums, model.parameters(), strict=True):
            p.grad = total
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(sum(task.item() for task in tasks))
    return Trained(losses, [model])


@specimen
def two_ascents() -> Trained:
    """SAM: up to the worst neighbour, gradients anew, and back."""
    model, optimizer = _one_optimizer(14)
    losses = []
    for _ in range(3):
        x = torch.randn(8, 8)
        model(x).square().mean().backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moves = [0.05 * p.grad / (norm + 1e-12) for p in model.parameters()]
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Trained(losses, [model])


@specimen
def polluted_critic() -> Trained:
    """The critic's optimizer zeroes what the generator's backward pass left there, before the generator steps."""
    torch.manual_seed(15)
    made, critic, losses = nn.Linear(4, 8), Narrow(), []
    of_made, of_critic = torch.optim.SGD(made.parameters(), 0.01), torch.optim.SGD(critic.parameters(), 0.01)
    for step in range(3):
        critic(made(torch.randn(8, 4)).detach()).mean().backward()
        of_critic.step()
        of_critic.zero_grad()
        loss = critic(made(torch.randn(8, 4))).mean()
        (loss * (2.0**40 if step == 0 else 1.0)).backward()
        of_critic.zero_grad()
        for p in made.parameters():
            p.grad.nan_to_num_(posinf=0.0, neginf=0.0)
        of_made.step()
        of_made.zero_grad()
        losses.append(loss.item())
    return Trained(losses, [made, critic])


@specimen
def saliency_between() -> Trained:
    """Input gradients before each step, by ``backward``; zeroed twice, once by the module; one of them overflows."""
    model, optimizer = _one_optimizer(16)
    losses = []
    for step in range(3):
        model.eval()
        x = torch.randn(2, 8, requires_grad=True)
        (model(x).sum() * (2.0**40 if step == 1 else 1.0)).backward()
        model.train()
        model.zero_grad()
        optimizer.zero_grad()
        loss = _loss(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, [model])


@specimen
def overflow_accumulated() -> Trained:
    """Micro-batches of which one overflows; its Inf is taken out before the step."""
    model, optimizer = _one_optimizer(17)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        total = 0.0
        for micro in range(3):
            loss = _loss(model)
            (loss * (2.0**40 if micro == 1 else 1.0)).backward()
            total += loss.item()
        for p in model.parameters():
            p.grad.nan_to_num_(posinf=0.0, neginf=0.0)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(total)
    return Trained(losses, [model])


@specimen
def learns_to_learn() -> Trained:
    """First-order MAML: a copy is trained by backward and hand-written updates, its gradients zeroed each time."""
    model, optimizer = _one_optimizer(18)
    losses = []
    for _ in range(3):
        learner = copy.deepcopy(model)
        for inner in range(3):
            learner.zero_grad()
            loss = _loss(learner)
            loss.backward()
            if inner < 2:
                with torch.no_grad():
                    for p in learner.parameters():
                        p -= 0.01 * p.grad
        for p, fast in zip(model.parameters(), learner.parameters(), strict=True):
            p.grad = fast.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Trained(losses, [model])
