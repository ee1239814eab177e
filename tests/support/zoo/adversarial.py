"""Several models, several optimizers, gradients of gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.zoo import Trained, fit, specimen


class Generator(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 16), nn.LeakyReLU(0.2, inplace=True), nn.Linear(16, 8), nn.Tanh())


class Discriminator(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.LeakyReLU(0.2, inplace=True), nn.Linear(16, 1))


@specimen
def gan() -> Trained:
    torch.manual_seed(0)
    g, d, bce = Generator(), Discriminator(), nn.BCEWithLogitsLoss()
    of_g, of_d = torch.optim.Adam(g.parameters(), 2e-3), torch.optim.Adam(d.parameters(), 2e-3)
    losses = []
    for _ in range(3):
        of_d.zero_grad()
        real = bce(d(torch.randn(6, 8)), torch.ones(6, 1))
        real.backward()
        made = g(torch.randn(6, 4))
        fake = bce(d(made.detach()), torch.zeros(6, 1))
        fake.backward()
        of_d.step()
        of_g.zero_grad()
        fooled = bce(d(made), torch.ones(6, 1))
        fooled.backward()
        nn.utils.clip_grad_norm_(g.parameters(), 1e-3)
        of_g.step()
        losses += [real.item(), fake.item(), fooled.item()]
    return Trained(losses, [g, d])


@specimen
def gradient_penalty() -> Trained:
    torch.manual_seed(1)
    critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss() -> Tensor:
        x = torch.randn(6, 4, requires_grad=True)
        y = critic(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.mean() + 10 * ((slope.norm(dim=1) - 1) ** 2).mean()

    return Trained(fit(critic, torch.optim.Adam(critic.parameters(), 1e-3), loss), [critic])


class Student(nn.Module):
    """Its first layer is frozen, and so is an encoder that it runs without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.frozen, self.out = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.encoder(x)
        return self.out(self.frozen(x).relu())


class Teacher(nn.Linear):
    pass


@specimen
def distillation() -> Trained:
    torch.manual_seed(2)
    teacher, student = Teacher(8, 4).eval(), Student()

    def loss() -> Tensor:
        x = torch.randn(6, 8)
        with torch.no_grad():
            target = teacher(x)
        return F.mse_loss(student(x), target)

    optimizer = torch.optim.RMSprop(student.parameters(), 1e-2)  # the frozen ones are given to it, too
    return Trained(fit(student, optimizer, loss), [student, teacher])
