"""Derivatives that torch computes by other formulas while a mode is on the stack, and of tensors without memory.

``python -m tests.support.derivatives NAME ...`` prints a JSON object: the digest of each of these trainings, by name.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian

from tests.support.zoo import Trained

Loss = Callable[[nn.Module, Tensor], Tensor]


class Gates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 9)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.last(torch.tanh(self.norm(self.first(x)))))


class Field(nn.Module):
    """Takes a gradient inside its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = Gates()

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        gates = self.gates(x)
        return torch.autograd.grad(gates.prod(1).sum() + gates.cumprod(1).sum(), x, create_graph=True)[0]


def _trained(model: nn.Module, loss_of: Loss) -> Trained:
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for _ in range(8):
        loss = loss_of(model, torch.randn(16, 6))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, [model])


def _penalty(score_of: Callable[[Tensor], Tensor]) -> Loss:
    """A loss that is a function of the gradient of a score."""

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        x.requires_grad_()
        score = score_of(model(x))
        (grad,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return (grad.norm(dim=1) - 1).square().mean() + score.mean()

    return loss_of


def product_of_gates() -> Trained:
    torch.manual_seed(4)
    return _trained(Gates(), lambda model, x: (model(x).prod(1) - 0.5).square().mean())


def gradient_penalty_of_products() -> Trained:
    torch.manual_seed(5)
    return _trained(Gates(), _penalty(lambda gates: gates.prod(1) + gates.cumprod(1).sum(1)))


def gradient_penalty_of_determinants() -> Trained:
    torch.manual_seed(6)
    return _trained(Gates(), _penalty(lambda gates: torch.linalg.det(gates.view(-1, 3, 3) + 2 * torch.eye(3))))


def gradient_inside_forward() -> Trained:
    torch.manual_seed(7)
    return _trained(Field(), lambda model, x: model(x).square().mean())


def tangents() -> Trained:
    """Forward-mode differentiation: around the model, of a loss after it, and with zero tangents, which lack memory."""
    torch.manual_seed(8)

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        with forward_ad.dual_level():
            value, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))
            loss = loss + value.mean() + tangent.square().mean()
            dual = forward_ad.make_dual(value, tangent.detach())
            tangent = forward_ad.unpack_dual(F.layer_norm(dual, (9,), torch.arange(1.0, 10.0))).tangent
            loss = loss + tangent.square().mean()
        return loss + jacobian(model, x[0], vectorize=True, strategy="forward-mode").square().sum()

    return _trained(Gates(), loss_of)


class _Adjoint(torch.autograd.Function):
    """A field whose backward pass takes several gradients of its output at once, as adjoint solvers do."""

    @staticmethod
    def forward(ctx: Any, model: nn.Module, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.model = model
        ctx.save_for_backward(x, *weights)
        return model(x).sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        with torch.enable_grad():
            values = ctx.model(x).sum(0)
        rows = torch.autograd.grad(values, weights, torch.eye(9), is_grads_batched=True)
        return None, None, *(row.mean(0) * grads[0].mean() for row in rows)


def batched_gradients() -> Trained:
    torch.manual_seed(9)
    return _trained(Gates(), lambda model, x: _Adjoint.apply(model, x, *model.parameters()).square().mean())


if __name__ == "__main__":
    print(json.dumps({name: globals()[name]().digest() for name in sys.argv[1:]}))
