"""Projecting conflicting gradients: each task's gradient loses what points against another task's."""

import torch


class PCGrad:
    def __init__(self, optimizer, parameters):
        self.optimizer = optimizer
        self.parameters = list(parameters)

    def zero_grad(self):
        self.optimizer.zero_grad(set_to_none=True)

    def step(self):
        self.optimizer.step()

    def backward(self, losses):
        flat = [self._gradient_of(loss) for loss in losses]
        merged = torch.zeros_like(flat[0])
        for i, own in enumerate(flat):
            kept = own.clone()
            for j, other in enumerate(flat):
                along = torch.dot(kept, other)
                if i != j and along < 0:
                    kept -= along / other.square().sum().clamp(min=1e-12) * other
            merged += kept
        self.zero_grad()
        pieces = merged.split([p.numel() for p in self.parameters])
        for parameter, piece in zip(self.parameters, pieces):
            parameter.grad = piece.view_as(parameter).clone()

    def _gradient_of(self, loss):
        self.zero_grad()
        loss.backward(retain_graph=True)
        rows = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        return torch.cat([row.flatten() for row in rows])
