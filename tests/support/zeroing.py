"""Loops that zero gradients, each in its own way or not at all; run as a module, it records each into a directory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import precdoctor

STEPS = 12
LOOPS: dict[str, Callable[[], None]] = {}


def loop(function: Callable[[], None]) -> Callable[[], None]:
    LOOPS[function.__name__] = function
    return function


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss(net: nn.Module) -> Tensor:
    return net(torch.randn(4, 4)).square().mean()


def train(optimizer: torch.optim.Optimizer, net: nn.Module, *, zero: Callable[[], None] | None = None,
          before_step: Callable[[], Any] | None = None, passes: int = 1) -> None:  # fmt: skip
    for _ in range(STEPS):
        for _ in range(passes):
            loss(net).backward()
        if before_step is not None:
            before_step()
        optimizer.step()
        if zero is not None:
            zero()


@loop
def missing() -> None:
    net = model()
    train(torch.optim.SGD(net.parameters(), 1e-3), net)


@loop
def missing_with_adam_and_schedule() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3, foreach=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    train(optimizer, net, zero=schedule.step, passes=2)


@loop
def missing_though_clipped() -> None:
    net = model()
    clip = torch.nn.utils.clip_grad_norm_
    train(torch.optim.SGD(net.parameters(), 1e-3), net, before_step=lambda: clip(net.parameters(), 0.5))


@loop
def missing_in_one_of_two() -> None:
    nets = model(), model()
    first, second = (torch.optim.SGD(net.parameters(), 1e-3) for net in nets)
    for _ in range(STEPS):
        first.zero_grad()
        loss(nets[0]).backward()
        first.step()
        loss(nets[1]).backward()
        second.step()


@loop
def missing_for_the_rest() -> None:
    """``model.zero_grad()`` does not reach what the optimizer trains besides."""
    net, scale = model(), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([scale, *net.parameters()], 1e-3)
    for _ in range(STEPS):
        net.zero_grad()
        (loss(net) * scale.sum()).backward()
        optimizer.step()


@loop
def missing_in_ddp() -> None:
    net = nn.parallel.DistributedDataParallel(model())
    train(torch.optim.SGD(net.parameters(), 1e-3), net)


@loop
def zeroed_in_ddp() -> None:
    net = nn.parallel.DistributedDataParallel(model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    train(optimizer, net, zero=lambda: optimizer.zero_grad(set_to_none=False))


@loop
def zeroed() -> None:
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    train(optimizer, net, zero=optimizer.zero_grad)


@loop
def zeroed_in_place() -> None:
    for foreach in (False, True):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), 1e-3, foreach=foreach)
        train(optimizer, net, zero=lambda optimizer=optimizer: optimizer.zero_grad(set_to_none=False))


@loop
def zeroed_by_data() -> None:
    """As scripts of 2017 do; the version counter does not see it."""
    net = model()
    train(torch.optim.SGD(net.parameters(), 1e-3), net, zero=lambda: [p.grad.data.zero_() for p in net.parameters()])


@loop
def zeroed_before_backward() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    for _ in range(STEPS):
        found = loss(net)
        net.zero_grad()
        found.backward()
        optimizer.step()


@loop
def accumulated() -> None:
    net = model()
    net[0].requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    train(optimizer, net, zero=optimizer.zero_grad, passes=10)


@loop
def adversaries() -> None:
    generator, critic = nn.Linear(4, 4), model()
    ours, theirs = torch.optim.Adam(generator.parameters()), torch.optim.Adam(critic.parameters())
    for _ in range(STEPS):
        theirs.zero_grad()
        critic(generator(torch.randn(4, 4)).detach()).mean().backward()
        theirs.step()
        ours.zero_grad()
        critic(generator(torch.randn(4, 4))).mean().backward()  # into the critic's gradients, too
        ours.step()


@loop
def under_a_scaler() -> None:
    """What is kept is divided by the scale: it does not count."""
    net = model()
    optimizer, scaler = torch.optim.SGD(net.parameters(), 1e-3), torch.amp.GradScaler("cpu")
    for zero in (False, True):
        for _ in range(STEPS):
            scaler.scale(loss(net)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            if zero:
                optimizer.zero_grad()


@loop
def with_a_closure() -> None:
    net = model()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        found = loss(net)
        found.backward()
        return found

    for _ in range(STEPS):
        optimizer.step(closure)


@loop
def sharpness_aware() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    for _ in range(STEPS):
        for sign in (0.1, -0.1):
            loss(net).backward()
            if sign > 0:
                with torch.no_grad():
                    for p in net.parameters():
                        p.add_(p.grad, alpha=sign)
                optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()


@loop
def stepped_in_backward() -> None:
    net = model()
    optimizers = {p: torch.optim.SGD([p], 1e-3) for p in net.parameters()}

    def hook(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(hook)
    for _ in range(STEPS):
        loss(net).backward()


@loop
def given_by_hand() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    for _ in range(STEPS):
        for p, grad in zip(net.parameters(), torch.autograd.grad(loss(net), list(net.parameters())), strict=True):
            p.grad = grad
        optimizer.step()


@loop
def decayed_by_hand() -> None:
    """A momentum that is kept in the gradients themselves."""
    net = model()
    decay = lambda: [p.grad.mul_(0.5) for p in net.parameters()]  # noqa: E731
    train(torch.optim.SGD(net.parameters(), 1e-3), net, before_step=decay)


@loop
def zeroed_by_the_optimizer() -> None:
    class Tidy(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            done = super().step(closure)
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad.zero_()
            return done

    net = model()
    train(Tidy(net.parameters(), 1e-3), net)


def accumulate(*, each: bool, throw_away: bool = False) -> None:
    """Twelve attempts of four micro-batches under a scaler."""
    net = model()
    optimizer, scaler = torch.optim.SGD(net.parameters(), 1e-3), torch.amp.GradScaler("cpu")
    for i in range(4 * STEPS):
        scaler.scale(loss(net)).backward()
        last = i % 4 == 3
        if each or last:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            if last:
                scaler.step(optimizer)
            scaler.update()
        if last or throw_away:
            optimizer.zero_grad()


@loop
def unscaled_each() -> None:
    accumulate(each=True)


@loop
def unscaled_once() -> None:
    accumulate(each=False)


@loop
def three_of_four_thrown_away() -> None:
    """Finite, unscaled, and given up: each was an attempt."""
    accumulate(each=True, throw_away=True)


def after_each_pass(change: Callable[[nn.Module, int], Any]) -> None:
    """Four passes a step, and something happens to the gradients after each."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    for _ in range(STEPS):
        for i in range(4):
            loss(net).backward()
            change(net, i)
        optimizer.step()
        optimizer.zero_grad()


def divide(net: nn.Module, by: float) -> None:
    for p in net.parameters():
        assert p.grad is not None
        p.grad.data.div_(by)


@loop
def divided_after_each_pass() -> None:
    after_each_pass(lambda net, _: divide(net, 4096.0))


@loop
def replaced_after_each_pass() -> None:
    def change(net: nn.Module, _: int) -> None:
        for p in net.parameters():
            p.grad = p.grad / 4.0

    after_each_pass(change)


@loop
def divided_after_the_last_pass() -> None:
    after_each_pass(lambda net, i: divide(net, 4096.0) if i == 3 else None)


@loop
def divided_before_each_pass() -> None:
    """An average that forgets: the last pass is not divided."""
    after_each_pass(lambda net, i: divide(net, 2.0) if i < 3 else None)


@loop
def clipped_after_each_pass() -> None:
    after_each_pass(lambda net, _: torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3))


def scaled(*, what: str) -> None:
    """A GradScaler around a loss, or beside it."""
    net = model()
    optimizer, scaler = torch.optim.SGD(net.parameters(), 1e-3), torch.amp.GradScaler("cpu")
    for i in range(STEPS):
        x = loss(net)
        given = scaler.scale(x)
        if what == "both" or (what == "sometimes" and i % 2):
            given.backward(retain_graph=True)
        if what != "returned":
            x.backward()
        else:
            given.backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@loop
def scale_dropped() -> None:
    scaled(what="dropped")


@loop
def scale_dropped_sometimes() -> None:
    scaled(what="sometimes")


@loop
def scale_kept() -> None:
    scaled(what="returned")


@loop
def scaled_and_as_it_was() -> None:
    """Two backward passes a step, one of them scaled: whatever that is for, the scale is used."""
    scaled(what="both")


def mixed(second: Callable[[torch.amp.GradScaler, torch.optim.Optimizer, Tensor], object], *, alone: bool = False,
          first: bool = False, zero: bool = False, of: int = 1) -> None:  # fmt: skip
    """A scaled loss and a second one, which is given to ``second``.

    Args:
        alone: the second loss reaches the weights of a head of its own only.
        first: the second loss comes first.
        zero: gradients are zeroed between the two.
        of: number of micro-batches.
    """
    net, head = model(), nn.Linear(8, 1)
    optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def auxiliary(hidden: Tensor) -> None:
        second(scaler, optimizer, head(hidden.detach() if alone else hidden).square().mean())

    for _ in range(STEPS):
        for _ in range(of):
            hidden = net[:2](torch.randn(4, 4))
            if first:
                auxiliary(hidden)
            if zero:
                optimizer.zero_grad()
            scaler.scale(net[2](hidden).square().mean() / of).div(1).backward(retain_graph=True)
            if not first:
                auxiliary(hidden)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@loop
def second_loss_unscaled() -> None:
    mixed(lambda scaler, optimizer, x: (x * 0.5).backward(retain_graph=True))


@loop
def second_loss_unscaled_first() -> None:
    mixed(lambda scaler, optimizer, x: x.backward(retain_graph=True), first=True)


@loop
def second_loss_unscaled_in_each_micro_batch() -> None:
    mixed(lambda scaler, optimizer, x: x.backward(retain_graph=True), of=3)


@loop
def second_loss_of_its_own_head_unscaled_on_every_step() -> None:
    mixed(lambda scaler, optimizer, x: x.backward(), alone=True)


@loop
def second_loss_scaled() -> None:
    mixed(lambda scaler, optimizer, x: (scaler.scale(x * 0.5) + 0.0).backward())


@loop
def second_loss_scaled_by_hand() -> None:
    mixed(lambda scaler, optimizer, x: (x * scaler.get_scale()).mean().backward())


@loop
def second_loss_with_a_gradient_that_is_the_scale() -> None:
    mixed(lambda scaler, optimizer, x: x.backward(torch.tensor(scaler.get_scale())))


@loop
def second_loss_after_unscaling_on_every_step() -> None:
    mixed(lambda scaler, optimizer, x: (scaler.unscale_(optimizer), x.backward()))


@loop
def second_loss_whose_gradients_are_zeroed_on_every_step() -> None:
    mixed(lambda scaler, optimizer, x: x.backward(retain_graph=True), first=True, zero=True)


@loop
def second_loss_of_another_optimizer_on_every_step() -> None:
    """The first optimizer steps without the scaler."""
    nets = model(), model()
    optimizers = [torch.optim.SGD(net.parameters(), 1e-3) for net in nets]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for _ in range(STEPS):
        loss(nets[0]).backward()
        scaler.scale(loss(nets[1])).backward()
        optimizers[0].step()
        scaler.step(optimizers[1])
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    for name, run in LOOPS.items():
        with precdoctor.record(directory / name, strict=True, every=1 if name.endswith(("_pass", "_step")) else 64):
            run()
    torch.distributed.destroy_process_group()
