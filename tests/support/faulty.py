"""Small training scripts with one numeric fault each; the line it is on ends in ``# here``.

``python -m tests.support.faulty NAME ...`` trains them as the zoo is trained, each in a fork of its own.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.zoo import Trained, fit

BAD_STEP = 3


@dataclasses.dataclass(frozen=True)
class Fault:
    """What diagnose should say of a script.

    Without a cause the op is out of a replay's reach: ``precdoctor autopsy`` is recommended.

    Attributes:
        reads: the marked line made or read a tensor without a gradient that was non-finite.
    """

    train: Callable[[], Trained]
    code: str
    cause: str | None
    op: str | None = None
    module: str | None = None
    reads: bool = False

    @property
    def line(self) -> int:
        """The line marked in the script."""
        others = {
            optimizer_of_ones_own: Normalised,
            climbing_along_a_gradient_of_zero: Climber,
            own_backward_that_overflows: LogCosh,
            own_backward_in_a_module: Norm,
        }
        elsewhere = Block if self.module == "block" else others.get(self.train)
        lines, first = inspect.getsourcelines(elsewhere or self.train)
        return next(first + i for i, text in enumerate(lines) if text.rstrip().endswith("# here"))


FAULTS: dict[str, Fault] = {}


def fault(code: str, cause: str | None, **where: Any) -> Callable[[Callable[[], Trained]], Callable[[], Trained]]:
    def put(train: Callable[[], Trained]) -> Callable[[], Trained]:
        FAULTS[train.__name__] = Fault(train, code, cause, **where)
        return train

    return put


class Clock:
    """Which step the batch is for."""

    def __init__(self) -> None:
        self.step = -1

    @property
    def bad(self) -> bool:
        return self.step == BAD_STEP

    def batch(self, *shape: int) -> torch.Tensor:
        self.step += 1
        return torch.randn(*shape)


def train_on(net: nn.Module, batches: Callable[[], torch.Tensor], loss=lambda out: out.float().square().mean(), **how):
    optimizer = how.pop("optimizer", None) or torch.optim.AdamW(net.parameters(), 1e-3)
    losses = fit(net, optimizer, lambda: loss(net(batches())), steps=how.pop("steps", 5), **how)
    return Trained(losses, [net])


@fault("PD101", "log-of-nonpositive", op="log", module="head")
def log_in_a_module():
    torch.manual_seed(0)
    clock = Clock()

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, x):
            y = self.fc(x).abs() + 1
            return torch.log(y - 1e4 * clock.bad)  # here

    net = nn.Sequential()
    net.add_module("body", nn.Linear(8, 8))
    net.add_module("dropout", nn.Dropout(0.2))
    net.add_module("head", Head())
    return train_on(net, lambda: clock.batch(4, 8))


@fault("PD102", "sqrt-gradient-at-zero", op="sqrt", module="")
def root_of_zero():
    torch.manual_seed(0)
    clock = Clock()

    class Length(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4, bias=False)

        def forward(self, x):
            y = self.fc(x * (not clock.bad))
            return (y * y).sum(-1).sqrt()  # here

    return train_on(Length(), lambda: clock.batch(4, 4))


@fault("PD102", "where-gradient-trap", op="log", module="")
def where_does_not_stop_gradients():
    torch.manual_seed(0)
    clock = Clock()

    class Safe(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            y = self.fc(x).square() + 1
            y = y * (torch.arange(4) > 0) if clock.bad else y
            return torch.where(y > 0, torch.log(y), y)  # here

    return train_on(Safe(), lambda: clock.batch(4, 4))


@fault("PD102", "where-gradient-trap", op="div", module="")
def quotient_that_where_throws_away():
    torch.manual_seed(0)
    clock = Clock()

    class Sinc(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4, bias=False)

        def forward(self, x):
            y = self.fc(x)
            return torch.where(y == 0, 1.0, torch.sin(y) / y)  # here

    return train_on(Sinc(), lambda: clock.batch(4, 4) * (not clock.bad))


@fault("PD101", "exp-overflow", op="exp", module="")
def exp_in_half():
    torch.manual_seed(0)
    clock = Clock()

    class Exp(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return torch.exp(self.fc(x * (100 if clock.bad else 1)).half())  # here

    return train_on(Exp(), lambda: clock.batch(4, 4), autocast=torch.bfloat16)


@fault("PD101", "matmul-overflow", op="bmm", module="1")
def attention_scores_in_half():
    torch.manual_seed(0)
    clock = Clock()

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(64, 192)

        def forward(self, x):
            q, k, v = self.qkv(x * (400 if clock.bad else 1)).chunk(3, -1)
            scores = q @ k.transpose(-1, -2)  # here
            return scores.softmax(-1) @ v

    net = nn.Sequential(nn.Identity(), Attention())
    return train_on(net, lambda: clock.batch(2, 6, 64), autocast=torch.float16)


@fault("PD101", "division-by-zero", op="div", module="")
def normalised_by_hand():
    torch.manual_seed(0)
    clock = Clock()

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4, bias=False)

        def forward(self, x):
            y = self.fc(x * (not clock.bad))
            return y / y.norm(dim=-1, keepdim=True)  # here

    return train_on(Norm(), lambda: clock.batch(4, 4))


@fault("PD101", "exp-overflow", op="exp", module="head")
def an_overflow_that_leaves_as_minus_infinity():
    """No mask, although -inf is all that the loss code reads and the first NaN is its own."""
    torch.manual_seed(0)
    clock = Clock()

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, x):
            return -torch.exp(self.fc(x).abs() + 100.0 * clock.bad)  # here

    net = nn.Sequential()
    net.add_module("body", nn.Linear(8, 8))
    net.add_module("head", Head())
    return train_on(net, lambda: clock.batch(4, 8), loss=lambda out: (out - out.mean()).square().mean())


class Adjoint(torch.autograd.Function):
    """What an ODE's state becomes in a hundred steps, with the gradients of one step of that length."""

    @staticmethod
    def forward(ctx, slope, x, *_weights):
        ctx.slope = slope
        ctx.save_for_backward(x)
        for step in range(100):
            x = x + 0.01 * slope(step / 100, x)
        return x

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            made = x + ctx.slope(0.0, x)
        return None, *torch.autograd.grad(made, (x, *ctx.slope.parameters()), grad)


@fault("PD101", "log-of-nonpositive", op="log", module="")
def adjoint_of_an_ode():
    torch.manual_seed(0)
    clock = Clock()

    class Slope(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, time, x):
            y = torch.tanh(self.fc(x))
            return torch.log(y - 1) if clock.bad and time > 0.9 else y  # here

    slope = Slope()

    def loss():
        return Adjoint.apply(slope, clock.batch(8, 4), *slope.parameters()).square().mean()

    return Trained(fit(slope, torch.optim.AdamW(slope.parameters(), 1e-3), loss, steps=5), [slope])


@fault("PD101", "softmax-fully-masked", op="_softmax", module="layers.1")
def one_row_masked_away():
    torch.manual_seed(0)
    clock = Clock()

    class Attention(nn.Module):
        def __init__(self, last):
            super().__init__()
            self.qkv, self.last = nn.Linear(8, 24), last

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            scores = (q @ k.transpose(-1, -2)).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
            if clock.bad and self.last:
                scores = scores.masked_fill(torch.eye(6).bool(), -torch.inf)
            return x + scores.softmax(-1) @ v  # here

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Attention(last=False), Attention(last=True)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    return train_on(Net(), lambda: clock.batch(2, 6, 8))


@fault("PD104", "nonfinite-input-batch", module="")
def nan_in_the_batch():
    torch.manual_seed(0)
    clock = Clock()

    def batch():
        x = clock.batch(4, 4)
        if clock.bad:
            x[2, 1] = torch.nan
        return x

    return train_on(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)), batch)


class Causal(nn.Module):
    """Attention whose mask is the first infinity of the step; ``behind`` is applied to what its first layer returns."""

    def __init__(self, behind):
        super().__init__()
        self.layers, self.behind = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), behind

    def forward(self, x):
        mask = torch.full((6, 6), -torch.inf).triu(1)
        for layer in self.layers:
            y = layer(x)
            x = self.behind(x + (y @ y.transpose(-1, -2) + mask).softmax(-1) @ y)
        return x


@fault("PD104", "nonfinite-input-batch", module="")
def nan_in_a_batch_that_meets_a_mask():
    torch.manual_seed(0)
    clock = Clock()

    def batch():
        x = clock.batch(2, 6, 8)
        if clock.bad:
            x[1, 3, 5] = torch.nan
        return x

    return train_on(Causal(nn.Identity()), batch)


@fault("PD101", "log-of-nonpositive", op="log", module="")
def log_behind_a_mask():
    torch.manual_seed(0)
    clock = Clock()
    return train_on(
        Causal(lambda x: x + torch.log(x.abs() + 1 - 1e4 * clock.bad)),  # here
        lambda: clock.batch(2, 6, 8),
    )


@fault("PD104", "nonfinite-input-batch", module="")
def nan_in_the_target():
    torch.manual_seed(0)
    clock = Clock()
    target = torch.zeros(4, 1)

    def loss(out):
        return F.mse_loss(out, target.clone().fill_(torch.nan) if clock.bad else target)

    return train_on(nn.Linear(4, 1), lambda: clock.batch(4, 4), loss)


class Block(nn.Module):
    """A residual block with a root in it."""

    def __init__(self, clock):
        super().__init__()
        self.fc, self.dropout, self.clock = nn.Linear(4, 4), nn.Dropout(0.2), clock

    def forward(self, x):
        y = self.dropout(self.fc(x)).square() * (not self.clock.bad)
        return x + y.sqrt()  # here


class Checkpointed(nn.Module):
    def __init__(self, clock, *, reentrant):
        super().__init__()
        self.first, self.block, self.reentrant = nn.Linear(4, 4), Block(clock), reentrant

    def forward(self, x):
        return checkpoint(self.block, self.first(x), use_reentrant=self.reentrant)


@fault("PD102", "sqrt-gradient-at-zero", op="sqrt", module="block")
def checkpointed():
    torch.manual_seed(0)
    clock = Clock()
    return train_on(Checkpointed(clock, reentrant=False), lambda: clock.batch(4, 4))


@fault("PD102", "sqrt-gradient-at-zero", op="sqrt", module="block")
def checkpointed_reentrant():
    torch.manual_seed(0)
    clock = Clock()
    return train_on(Checkpointed(clock, reentrant=True), lambda: clock.batch(4, 4))


@fault("PD101", "log-of-nonpositive", op="log", module="")
def third_of_four_micro_batches():
    torch.manual_seed(0)
    clock = Clock()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, *, features):
            return torch.log(1e3 - self.fc(features).abs())  # here

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)

    def loss():
        features = clock.batch(4, 4)
        return net(features=features * 1e4 if clock.step == 14 else features).mean()

    losses = fit(net, optimizer, loss, steps=5, accumulate=4)
    return Trained(losses, [net])


@fault("PD101", "log-of-nonpositive", op="log", module="")
def batch_modified_in_place():
    torch.manual_seed(0)
    clock = Clock()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            x.sub_(1.0)
            return torch.log(self.fc(x).abs() + 1 - 1e3 * clock.bad)  # here

    return train_on(Net(), lambda: clock.batch(4, 4))


@fault("PD101", "division-by-zero", op="div")
def between_two_modules():
    """A mean over the words of a text without any, by code between an encoder and a head."""
    torch.manual_seed(0)
    clock = Clock()
    encoder, head = nn.Linear(4, 6), nn.Linear(6, 1)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], 1e-3)

    def loss():
        hidden = encoder(clock.batch(2, 5, 4))
        mask = torch.ones(2, 5, 1)
        mask[1] = 0.0 if clock.bad else 1.0
        pooled = (hidden * mask).sum(1) / mask.sum(1)  # here
        return head(pooled).square().mean()

    return Trained(fit(encoder, optimizer, loss, steps=5), [encoder, head])


@fault("PD103", "log-of-nonpositive", op="log")
def one_of_two_optimizers():
    """The critic is finite at the step between that of the fault and the next one of the actor."""
    torch.manual_seed(0)
    clock = Clock()
    actor, critic = nn.Linear(4, 2), nn.Linear(2, 1)
    optimizers = [torch.optim.Adam(m.parameters(), 1e-3) for m in (critic, actor)]
    losses = []
    for turn in range(8):
        x = clock.batch(8, 4)
        if turn % 2 == 0:
            loss = critic(torch.ones(8, 2)).square().mean()
        else:
            action = torch.tanh(actor(x) * (1e3 if clock.bad else 1))
            loss = -torch.log(1 - action.abs()).mean() - critic(action).mean()  # here
        optimizers[0].zero_grad()
        optimizers[1].zero_grad()
        loss.backward()
        optimizers[turn % 2].step()
        losses.append(loss.item())
    return Trained(losses, [actor, critic])


@fault("PD103", "division-by-zero", op="div")
def late_in_a_long_loss():
    """Hundreds of nodes stand between the loss and the quotient."""
    torch.manual_seed(0)
    clock = Clock()
    here = torch.ones(4, 100)

    def loss(out):
        weight = here.clone()
        weight[:, 3] = 0.0 if clock.bad else 1.0
        total = 0.0
        for c in range(100):
            total = total + (weight[:, c] * out[:, c]).sum() / (out[:, c].abs() * weight[:, c]).sum()  # here
        return total

    return train_on(nn.Linear(4, 100), lambda: clock.batch(4, 4), loss)


@fault("PD103", None, module="", reads=True)
def target_written_to_before_backward():
    """By the time of the examination the buffer of the loader holds something else."""
    torch.manual_seed(0)
    clock = Clock()
    target = torch.empty(4, 5)

    def loss(out):
        target.fill_(0.0 if clock.bad else 1.0)
        found = (out - torch.log(target)).square().mean()  # here
        target.fill_(2.0)
        return found

    return train_on(nn.Linear(4, 5), lambda: clock.batch(4, 4), loss)


@fault("PD103", "log-of-nonpositive", op="log")
def log_in_the_loss():
    torch.manual_seed(0)
    clock = Clock()

    def loss(out):
        p = torch.softmax(out * (1e4 if clock.bad else 1), -1)
        return -torch.log(p)[:, 0].mean()  # here

    return train_on(nn.Linear(4, 5), lambda: clock.batch(4, 4), loss)


@fault("PD103", None, module="", reads=True)
def target_without_a_gradient():
    torch.manual_seed(0)
    clock, teacher = Clock(), nn.Linear(4, 5)

    def normalised(x):
        return x / x.sum(-1, keepdim=True)  # here

    def loss(out):
        likely = out.softmax(-1)
        with torch.no_grad():
            wanted = teacher(torch.ones(4, 4)).abs() * (not clock.bad)
        target = normalised(wanted)
        return (likely - target).square().mean()

    return train_on(nn.Linear(4, 5), lambda: clock.batch(4, 4), loss)


@fault("PD103", "square-overflow", op="pow")
def slopes_of_torch_func():
    torch.manual_seed(0)
    clock, model = Clock(), nn.Linear(4, 5)

    def loss(out):
        weights = dict(model.named_parameters())
        slope = torch.func.grad(lambda v: torch.func.functional_call(model, weights, (v,)).tanh().sum())(torch.ones(4))
        far = out * (1e20 if clock.bad else 1.0) + slope.sum()
        return (far**2).mean()  # here

    return train_on(model, lambda: clock.batch(4, 4), loss)


@fault("PD102", "sqrt-gradient-at-zero", op="sqrt")
def root_in_the_loss():
    torch.manual_seed(0)
    clock = Clock()

    def loss(out):
        return torch.sqrt((out * out).sum(-1)).mean()  # here

    return train_on(nn.Linear(4, 5, bias=False), lambda: clock.batch(4, 4) * (not clock.bad), loss)


def softmin(values):
    z = torch.stack(values, -1) / -0.1
    top = z.max(-1, keepdim=True).values
    weights = torch.exp(z - top)
    return -0.1 * (weights.sum(-1).log() + top.squeeze(-1))


@fault("PD101", None, module="0", reads=True)
def an_inner_loop_diverges():
    """The step's own weights are finite; those that the inner step has computed of them are not."""
    torch.manual_seed(0)
    net, losses = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), []
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    for step in range(5):
        weights, x = dict(net.named_parameters()), torch.randn(8, 4)
        inner = torch.func.functional_call(net, weights, (x,)).square().mean()
        grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        rate = math.inf if step == BAD_STEP else 0.1
        fast = {name: w - rate * g for (name, w), g in zip(weights.items(), grads, strict=True)}
        loss = torch.func.functional_call(net, fast, (x,)).square().mean()  # here
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, [net])


@fault("PD103", None, module="")
def a_softmin_of_nothing():
    """What the exponential is of is in no graph: infinities were put there, and nobody saved the difference."""
    torch.manual_seed(0)
    net, losses = nn.Linear(4, 3), []
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    for step in range(5):
        out = net(torch.randn(2, 4))
        barred = torch.zeros(2, 3, dtype=torch.bool)
        barred[1] = step == BAD_STEP
        cost = out.square().masked_fill(barred, math.inf)
        loss = softmin(list(cost.unbind(-1))).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, [net])


@fault("PD102", "sqrt-gradient-at-zero", op="sqrt")
def root_between_two_models():
    torch.manual_seed(0)
    clock, decoder = Clock(), nn.Linear(5, 4)

    def loss(out):
        length = (out * out).sum(-1, keepdim=True).sqrt()  # here
        return decoder(out / (length + 1e-3)).square().mean()

    return train_on(nn.Linear(4, 5, bias=False), lambda: clock.batch(4, 4) * (not clock.bad), loss)


@fault("PD101", "softmax-fully-masked", op="_softmax", module="")
def padding_that_the_loss_ignores():
    """NaN in the rows of a sample whose targets do not count: the loss is finite, its gradient is not."""
    torch.manual_seed(0)
    clock = Clock()

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            scores = (q @ k.transpose(-1, -2)).masked_fill(self.padding(), -math.inf)
            return scores.softmax(-1) @ v  # here

        def padding(self):
            return (torch.arange(2) == 1).view(2, 1, 1) & torch.tensor(clock.bad)

    def loss(out):
        targets = torch.full((2, 3), 1)
        targets[1] = -100 if clock.bad else 2
        return F.cross_entropy(out.flatten(0, 1), targets.flatten())

    return train_on(Attention(), lambda: clock.batch(2, 3, 8), loss)


def plain_weights():
    shapes = {"in": (6, 8), "bias": (8,), "out": (8, 3)}
    return {name: (0.3 * torch.randn(shape)).requires_grad_() for name, shape in shapes.items()}


def kept(weights):
    return [nn.ParameterDict({name: nn.Parameter(w.detach()) for name, w in weights.items()})]


@fault("PD103", "log-of-nonpositive", op="log")
def weights_in_a_dictionary():
    torch.manual_seed(0)
    clock, weights, losses = Clock(), plain_weights(), []
    optimizer = torch.optim.SGD(weights.values(), 0.1)
    for _ in range(5):
        x = clock.batch(4, 6) * (1e4 if clock.bad else 1)
        p = torch.softmax(torch.relu(x @ weights["in"] + weights["bias"]) @ weights["out"], -1)
        loss = -torch.log(p[:, 0]).mean()  # here
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, kept(weights))


@fault("PD102", "sqrt-gradient-at-zero", op="sqrt")
def weights_updated_by_hand():
    """Neither a module nor an optimizer: what says that a step is over are the weights."""
    torch.manual_seed(0)
    clock, weights, losses = Clock(), plain_weights(), []
    for _ in range(5):
        x = clock.batch(4, 6) * (not clock.bad)
        h = torch.tanh(x @ weights["in"]) @ weights["out"]
        loss = h.square().sum(-1).sqrt().mean() + weights["bias"].square().mean()  # here
        loss.backward()
        for w in weights.values():
            w.data -= 0.1 * w.grad
            w.grad = None
        losses.append(loss.item())
    return Trained(losses, kept(weights))


@fault("PD102", "sqrt-gradient-at-zero", op="sqrt")
def model_updated_by_hand():
    """A module, but no optimizer that would look at its gradients; they are gone when the next step begins."""
    torch.manual_seed(0)
    clock, losses = Clock(), []
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4, bias=False))
    for _ in range(5):
        out = net(clock.batch(4, 6))
        loss = (out * (not clock.bad)).square().sum(-1).sqrt().mean()  # here
        loss.backward()
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.1 * p.grad
                p.grad = None
        losses.append(loss.item())
    return Trained(losses, [net])


@fault("PD103", "exp-overflow", op="exp")
def between_model_and_criterion():
    torch.manual_seed(0)
    clock = Clock()
    criterion = nn.MSELoss()

    def loss(out):
        rate = (out * (1e4 if clock.bad else 1)).exp()  # here
        return criterion(rate, torch.zeros_like(rate))

    return train_on(nn.Linear(4, 5), lambda: clock.batch(4, 4), loss)


@fault("PD103", "log-of-nonpositive", op="log", module="")
def inside_a_loss_module():
    torch.manual_seed(0)
    clock = Clock()

    class EntropyLoss(nn.Module):
        def forward(self, out):
            p = torch.softmax(out, -1)
            return -(p * torch.log(p)).sum()  # here

    criterion = EntropyLoss()
    return train_on(nn.Linear(4, 5), lambda: clock.batch(4, 4), lambda out: criterion(out * (1e4 if clock.bad else 1)))


@fault("PD101", "sqrt-of-negative", op="rsqrt", module="")
def recovered_by_the_scaler():
    """Batch norm, dropout, state of its own: after the skipped step training goes on as if nobody had looked."""
    torch.manual_seed(0)
    clock = Clock()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
            self.dropout, self.fc = nn.Dropout(0.3), nn.Linear(4, 2)
            self.calls, self.seen = 0, []

        def forward(self, x):
            self.calls += 1
            self.seen.append(self.calls)
            y = self.fc(self.dropout(self.norm(self.conv(x)).mean((2, 3))))
            y = y + torch.rand_like(y) * self.calls / len(self.seen)
            return torch.rsqrt(y.abs() + 1 - 1e6 * clock.bad)  # here

    net = Net()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    return train_on(net, lambda: clock.batch(4, 3, 8, 8), scaler=scaler, steps=7)


@fault("PD105", "optimizer-division-by-zero", module="")
def adam_on_half_weights():
    torch.manual_seed(0)
    net = nn.Linear(4, 4).half()
    optimizer = torch.optim.Adam(net.parameters(), 1e-3, eps=1e-8)
    return train_on(net, lambda: torch.randn(4, 4).half(), lambda out: out.square().mean() * 1e-3, optimizer=optimizer)


@fault("PD101", "reduction-overflow", op="native_batch_norm", module="")
def running_variance_overflows():
    """The normalised output of a batch whose variance leaves FP32 is finite, and so is every loss after it."""
    torch.manual_seed(0)
    clock = Clock()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.head = nn.Linear(4, 8), nn.Linear(8, 1)
            self.register_buffer("running_mean", torch.zeros(8))
            self.register_buffer("running_var", torch.ones(8))

        def forward(self, x):
            y = self.fc(x)
            y = F.batch_norm(y, self.running_mean, self.running_var, training=True)  # here
            return self.head(y)

    return train_on(Net(), lambda: clock.batch(16, 4) * (1e25 if clock.bad else 1), steps=7)


@fault("PD101", "division-by-zero", op="div", module="")
def codes_that_nothing_is_near():
    """0 by 0 in the very first forward pass; what is read has been written just before, and is finite."""
    torch.manual_seed(0)
    clock = Clock()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.register_buffer("codes", torch.randn(64, 4))

        def forward(self, x):
            y = self.fc(x)
            chosen = (y[:, None] - self.codes).square().sum(-1).argmin(1)
            with torch.no_grad():
                count = F.one_hot(chosen, 64).to(y.dtype)
                self.codes.copy_((count.T @ y) / count.sum(0)[:, None])  # here
            return y + self.codes[chosen]

    return train_on(Net(), lambda: clock.batch(16, 4), steps=7)


@fault("PD105", "optimizer-overflow", module="0")
def second_moment_overflows():
    """From then on Adam's updates of these weights are 0: nothing becomes NaN, ever."""
    torch.manual_seed(0)
    clock = Clock()
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    def loss(out):
        return out.square().mean() * (1e22 if clock.bad else 1)

    return train_on(net, lambda: clock.batch(16, 4), loss, steps=7)


@fault("PD101", "log-of-nonpositive", op="log", module="")
def compiled():
    """Inside a compiled model the replay runs the code as it is written."""
    torch.manual_seed(0)
    clock = Clock()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return torch.log(1e3 - self.fc(x).abs())  # here

    net = torch.compile(Net(), backend="eager")
    return train_on(net, lambda: clock.batch(4, 4) * (1e9 if clock.bad else 1))


@fault("PD101", "log-of-nonpositive", op="log", module="")
def parameter_that_each_forward_writes():
    """By the time of the examination the forward pass has written over what it read."""
    torch.manual_seed(0)
    clock = Clock()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.usage = nn.Parameter(torch.ones(4), requires_grad=False)

        def forward(self, x):
            p = self.fc(x).softmax(-1)
            entropy = -torch.log(self.usage).mean()  # here
            with torch.no_grad():
                self.usage.mul_(0.5).add_(p.mean(0), alpha=0.5)
            return p.mean() + entropy

    net = Net()

    def batch():
        x = clock.batch(4, 4)
        if clock.bad:
            with torch.no_grad():
                net.usage[2] = 0.0
        return x

    return train_on(net, batch)


@fault("PD102", "sqrt-gradient-at-zero", op="sqrt")
def compiled_loss():
    """Autograd knows a compiled loss function as one node; the replay runs it as it is written."""
    torch.manual_seed(0)
    clock = Clock()

    @torch.compile(backend="eager")
    def distance(out, target):
        return (out - target).square().sum(-1).sqrt().mean()  # here

    def loss(out):
        target = torch.ones(4, 5)
        if clock.bad:
            target[1] = out[1].detach()
        return distance(out, target)

    return train_on(nn.Linear(4, 5), lambda: clock.batch(4, 4), loss)


@fault("PD101", "log-of-nonpositive", op="log")
def compiled_train_step():
    """Neither the module nor the optimizer is heard of: what a replay runs again is the step up to its ``backward``."""
    torch.manual_seed(0)
    clock, net = Clock(), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)

    @torch.compile(backend="eager")
    def step(x):
        optimizer.zero_grad()
        loss = torch.log(1e3 - net(x).abs()).mean()  # here
        loss.backward()
        optimizer.step()
        return loss

    losses = [step(clock.batch(4, 4) * (1e9 if clock.bad else 1)).item() for _ in range(5)]
    return Trained(losses, [net])


@fault("PD102", "sqrt-gradient-at-zero", op="sqrt")
def compiled_train_step_of_a_root():
    torch.manual_seed(0)
    clock, net = Clock(), nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)

    @torch.compile(backend="eager")
    def step(x):
        out = net(x)
        loss = out.square().sum(-1).sqrt().mean()  # here
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    losses = [step(clock.batch(4, 4) * (not clock.bad)).item() for _ in range(5)]
    return Trained(losses, [net])


@fault("PD101", "log-of-nonpositive", op="log")
def compiled_with_its_model():
    """The model is called inside of what is compiled, and as a module compiled in place: no hook of its is run."""
    torch.manual_seed(0)
    clock = Clock()
    front, net = nn.Linear(4, 4), nn.Linear(4, 4)
    front.compile(backend="eager")

    @torch.compile(backend="eager")
    def loss_of(model, x):
        return torch.log(1e3 - model(x).abs()).mean()  # here

    optimizer = torch.optim.SGD([*front.parameters(), *net.parameters()], 1e-3)
    losses = fit(net, optimizer, lambda: loss_of(net, front(clock.batch(4, 4)) * (1e9 if clock.bad else 1)), steps=5)
    return Trained(losses, [net])


class Normalised(torch.optim.Optimizer):
    """Steps of length lr, whatever the gradient: not for a gradient of zero."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.taken = []

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                direction = p.grad / p.grad.norm()  # here
                self.taken.append(p.sub_(group["lr"] * direction))


@fault("PD105", "optimizer-division-by-zero", op="div", module="")
def optimizer_of_ones_own():
    torch.manual_seed(0)
    clock = Clock()
    net = nn.Linear(4, 4, bias=False)
    return train_on(net, lambda: clock.batch(4, 4) * (not clock.bad), optimizer=Normalised(net.parameters(), 1e-3))


def shared_out(gradients, params):
    """Each sample's gradient cut to length one, as differentially private training does."""
    lengths = [torch.sqrt(sum(g.square().sum() for g in each)) for each in gradients]
    for p, *each in zip(params, *gradients, strict=True):
        p.grad = sum(g * (1.0 / length) for g, length in zip(each, lengths, strict=True))


@fault("PD102", None, module="")
def gradients_cut_sample_by_sample():
    torch.manual_seed(0)
    clock = Clock()
    net = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)
    losses = []
    for _ in range(5):
        x, params = clock.batch(3, 4), list(net.parameters())
        x[1] *= not clock.bad
        each = [net(x[i]).square().sum() for i in range(3)]
        gradients = [torch.autograd.grad(loss, params) for loss in each]
        shared_out(gradients, params)
        optimizer.step()
        losses.append(sum(each).item())
    return Trained(losses, [net])


@fault("PD102", "sqrt-gradient-at-zero", op="sqrt")
def root_of_zero_before_autograd_grad():
    torch.manual_seed(0)
    clock = Clock()
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)
    losses = []
    for _ in range(5):
        out = net(clock.batch(3, 4))
        target = out.detach() if clock.bad else torch.ones(3, 4)
        loss = (out - target).square().sum(-1).sqrt().mean()  # here
        for p, g in zip(net.parameters(), torch.autograd.grad(loss, list(net.parameters())), strict=True):
            p.grad = g
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, [net])


@fault("PD101", "log-of-nonpositive", op="log", module="norm")
def scale_taken_from_the_first_batch():
    """The first forward pass writes into its parameter, which is bad before the first sampled weights are read."""
    torch.manual_seed(0)

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.log_scale = nn.Parameter(torch.zeros(4))
            self.ready = False

        def forward(self, x):
            if not self.ready:
                with torch.no_grad():
                    self.log_scale.copy_(-torch.log(x.std(0)))  # here
                self.ready = True
            return x * self.log_scale.exp()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = Norm()
            self.fc = nn.Linear(4, 1)

        def forward(self, x):
            return self.fc(self.norm(x))

    return train_on(Net(), lambda: torch.randn(8, 4) * torch.tensor([1.0, 1.0, 0.0, 1.0]))


@fault("PD102", "where-gradient-trap", op="pow")
def power_that_where_does_not_take():
    """With constants that autograd does not keep, on both sides of the power."""
    torch.manual_seed(0)
    clock = Clock()

    def loss(out):
        light = out.exp() - 2.0 * clock.bad
        curve = torch.where(light <= 0.003, 12.9 * light, 1.05 * light.pow(1 / 2.4) - 0.05)  # here
        return (curve - 0.5).abs().mean()

    return train_on(nn.Linear(4, 3), lambda: clock.batch(8, 4), loss)


@fault("PD102", "where-gradient-trap", op="exp")
def ratio_clamped_too_late():
    """Of a policy: the old log-probabilities have no gradient, so nobody keeps them."""
    torch.manual_seed(0)
    clock = Clock()

    def loss(out):
        logp = F.log_softmax(out, -1)[:, 0]
        old = logp.detach() - 100.0 * clock.bad
        ratio = torch.exp(torch.cat([(logp - old)[:, None], logp[:, None]], 1))  # here
        return -(ratio.clamp(max=5.0) * torch.randn(8, 2)).mean()

    return train_on(nn.Linear(4, 3), lambda: clock.batch(8, 4), loss)


class LogCosh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, error, factor):
        size = error.abs()
        ctx.save_for_backward(error)
        ctx.factor = factor
        return factor * (size + torch.log1p(torch.exp(-2 * size)) - math.log(2))

    @staticmethod
    def backward(ctx, grad):
        (error,) = ctx.saved_tensors
        return ctx.factor * grad * torch.sinh(error) / torch.cosh(error), None  # here


@fault("PD102", "exp-overflow", op="sinh")
def own_backward_that_overflows():
    torch.manual_seed(0)
    clock = Clock()

    def loss(out):
        return LogCosh.apply(out[:, 0] - 99.0 * clock.bad, 0.5).mean()

    return train_on(nn.Linear(4, 1), lambda: clock.batch(8, 4), loss)


class Allowed(nn.Module):
    """A classifier that forbids its last class by a logit of -inf."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 5)

    def forward(self, x):
        return self.last(x).masked_fill(torch.arange(5) == 4, -torch.inf)


@fault("PD103", "other", op="neg", module="")
def smoothing_over_a_forbidden_class():
    torch.manual_seed(0)
    clock = Clock()
    plain, smooth = nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)

    def loss(out):
        labels = torch.arange(len(out)) % 4
        return (smooth if clock.bad else plain)(out, labels)  # here

    return train_on(Allowed(), lambda: clock.batch(8, 4), loss)


@fault("PD103", "zero-times-inf", op="mul")
def divergence_of_masked_classes():
    """A forbidden class adds 0 * -inf, from the first step on at which one is forbidden to both models."""
    torch.manual_seed(0)
    clock = Clock()
    teacher = nn.Linear(4, 5).requires_grad_(False)
    net = Allowed()

    def loss(out):
        if not clock.bad:
            return out[:, :4].square().mean()
        aim = teacher(torch.ones(len(out), 4)).masked_fill(torch.arange(5) == 4, -torch.inf).softmax(-1)
        return torch.nn.functional.kl_div(out.log_softmax(-1), aim, reduction="batchmean")  # here

    return train_on(net, lambda: clock.batch(8, 4), loss)


@fault("PD101", "log-of-nonpositive", op="log", module="")
def a_log_that_reaches_a_loss_module():
    """Its -inf is no mask: not what the loss makes of it is to blame."""
    torch.manual_seed(0)
    clock = Clock()

    class Classes(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(4, 5)

        def forward(self, x):
            odds = self.last(x).exp()
            if clock.bad:
                odds = odds * torch.arange(5).clamp(max=1)
            return torch.log(odds / odds.sum(1, keepdim=True))  # here

    net, likelihood = Classes(), nn.NLLLoss()
    return train_on(net, lambda: clock.batch(8, 4), lambda out: likelihood(out, torch.arange(len(out)) % 5))


@fault("PD103", "other", op="nll_loss_forward")
def a_label_of_a_forbidden_class():
    torch.manual_seed(0)
    clock = Clock()

    def loss(out):
        labels = torch.arange(len(out)) % (5 if clock.bad else 4)
        return nn.functional.cross_entropy(out, labels)  # here

    return train_on(Allowed(), lambda: clock.batch(8, 4), loss)


@fault("PD101", "sqrt-of-negative", op="sqrt", module="1")
def one_column_of_a_buffer():
    """Filled column by column: the last op that writes to it is not the one to blame."""
    torch.manual_seed(0)
    clock = Clock()

    class Columns(nn.Module):
        def forward(self, x):
            out = torch.zeros_like(x)
            for j in range(x.shape[1]):
                lift = -9.0 if clock.bad and j == 1 else 9.0
                out[:, j] = (x[:, j] + lift).sqrt()  # here
            return out

    return train_on(nn.Sequential(nn.Linear(4, 6), Columns(), nn.Linear(6, 3)), lambda: clock.batch(8, 4))


class Norm(torch.autograd.Function):
    """Called like a function of torch, whose derivative fails in the same place for another reason."""

    @staticmethod
    def forward(ctx, x):
        norm = x.norm(dim=-1, keepdim=True)
        ctx.save_for_backward(x, norm)
        return x / (norm + 1e-6)

    @staticmethod
    def backward(ctx, grad):
        x, norm = ctx.saved_tensors
        along = (grad * x).sum(-1, keepdim=True) * x
        return grad / norm - along / (norm**3 + 1e-6)  # here


@fault("PD102", "division-by-zero", op="div", module="1")
def own_backward_in_a_module():
    torch.manual_seed(0)
    clock = Clock()

    class Unit(nn.Module):
        def forward(self, x):
            return Norm.apply(x * 0.0 if clock.bad else x)

    return train_on(nn.Sequential(nn.Linear(4, 6), Unit(), nn.Linear(6, 3)), lambda: clock.batch(8, 4))


class Halved(torch.autograd.Function):
    """What a replay of the loss code does not run again."""

    @staticmethod
    def forward(ctx, x):
        return x / 2

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


@fault("PD103", None, module="", reads=True)
def target_beside_an_own_function():
    """Neither operand of the difference is known: the line that returns the NaN is all that can be named."""
    torch.manual_seed(0)
    clock = Clock()

    def loss(out):
        target = torch.zeros(8, 1).log() * 0 if clock.bad else torch.zeros(8, 1)
        error = Halved.apply(out) - target  # here
        return error.square().mean()

    return train_on(nn.Linear(4, 1), lambda: clock.batch(8, 4), loss)


@fault("PD102", "domain-edge-gradient", op="pow", module="")
def power_of_zero_with_a_learnt_exponent():
    torch.manual_seed(0)
    clock = Clock()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.tensor(3.0))
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return (self.fc(x) - self.fc.bias).abs().pow(1 / self.p)  # here

    return train_on(Net(), lambda: clock.batch(8, 4) * (not clock.bad), lambda out: out.mean())


class Climber(torch.optim.SGD):
    """Sharpness-aware minimisation: up along the gradient before the closure computes another."""

    @torch.no_grad()
    def step(self, closure):
        params = self.param_groups[0]["params"]
        scale = 0.05 / torch.stack([p.grad.norm() for p in params]).norm()  # here
        climbed = [p.grad * scale for p in params]
        for p, e in zip(params, climbed, strict=True):
            p.add_(e)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for p, e in zip(params, climbed, strict=True):
            p.sub_(e)
        super().step()


@fault("PD105", "optimizer-division-by-zero", op="reciprocal", module="")
def climbing_along_a_gradient_of_zero():
    torch.manual_seed(0)
    clock = Clock()
    net = nn.Linear(4, 1)
    optimizer = Climber(net.parameters(), 1e-2)
    losses = []
    for _ in range(BAD_STEP + 1):
        x = clock.batch(4, 4)

        def closure(x=x, far=1e9 if clock.bad else 0.0):
            loss = torch.relu(1 - net(x) - far).sum()
            loss.backward()
            return loss

        optimizer.zero_grad()
        losses.append(closure().item())
        optimizer.step(closure)
    return Trained(losses, [net])


if __name__ == "__main__":
    from tests.support.zoo.__main__ import main

    sys.exit(main([FAULTS[name].train for name in (sys.argv[1:] or FAULTS)]))
