"""A training in which everything that is not torch's is hostile to whoever looks at it, and kind to who trains it.

Every special method and property of its modules, optimizers, batches, outputs, criteria and schedulers looks at the
stack: called on behalf of precdoctor it writes that down, spoils the object and raises. The training itself, torch and
the rest of Python may do as they like.

Usage: ``hostile_zoo.py PACKAGE NOTES STEPS plain|scaler|wrapper BAD``: the folder of precdoctor, a file for what it
called, and the step that comes to a NaN (-1: none). Prints losses to the last bit, and a digest of the weights.
"""

from __future__ import annotations

import dataclasses
import hashlib
import linecache
import sys
from collections import OrderedDict, UserDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

PACKAGE, NOTES = (sys.argv[1], Path(sys.argv[2])) if __name__ == "__main__" else ("", Path())
SPECIAL = frozenset(
    """
__copy__ __deepcopy__ __reduce__ __reduce_ex__ __getstate__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __hash__ __len__
__length_hint__ __bool__ __repr__ __str__ __format__ __bytes__ __iter__ __reversed__ __contains__ __getitem__ __dir__
__setitem__ __delitem__ __getattribute__ __getattr__ __setattr__ __delattr__ __float__ __int__ __index__ __complex__
__get__ __enter__ __exit__ __next__ __sizeof__ __array__ __torch_function__ __add__ __radd__ __mul__ __rmul__
__sub__ __neg__ __abs__ __round__ __instancecheck__ __subclasscheck__ keys items values get pop copy update append
__missing__ __or__ __del__
""".split()  # noqa: SIM905 - sixty names
)
#: Lines of precdoctor that call what the script itself has called, in its place.
PASSED_ON = ("original(", "parameters = list(parameters)")
#: A replay runs a module's forward as torch does: what that asks of the module is the user's own code.
MODULE_CALLS = ("_call_impl", "_wrapped_call_impl", "functional_call")


def culprit() -> str | None:
    """The line of precdoctor on whose behalf a special method runs."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.startswith(PACKAGE):
            line = linecache.getline(file, frame.f_lineno)
            return None if any(text in line for text in PASSED_ON) else f"{file}:{frame.f_lineno} {line.strip()}"
        if name in MODULE_CALLS or (file == __file__ and name not in ("method", "culprit", "getter")):
            return None
        frame = frame.f_back
    return None


def blame(what: str, line: str) -> None:
    with NOTES.open("a") as notes:
        notes.write(f"{what} called by {line}\n")
    import os

    if not os.environ.get("KIND"):
        raise RuntimeError(f"{what} is none of your business")


def hostile(kind: type) -> type:
    """The same class; its special methods and ``__class__`` refuse precdoctor."""

    def method(name: str, original: Any) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if (line := culprit()) is not None:
                blame(f"{kind.__name__}.{name}{args[:1] if name.startswith('__geta') else ''}", line)
            return original(self, *args, **kwargs)

        return method

    namespace = {}
    for name in SPECIAL:
        original = getattr(kind, name, None)
        if name == "__hash__" and original is None:
            continue
        if original is not None and name not in ("__torch_function__", "__instancecheck__", "__subclasscheck__"):
            namespace[name] = method(name, original)

    def getter(self: Any) -> type:
        if (line := culprit()) is not None:
            blame(f"{kind.__name__}.__class__", line)
        return type(self)

    namespace["__class__"] = property(getter)
    namespace["__module__"] = __name__
    if issubclass(kind, tuple):
        namespace["__slots__"] = ()
    return type(kind)(kind.__name__, (kind,), namespace)


class Refusing:
    """A descriptor with a life of its own: a property that must not be read."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if (line := culprit()) is not None:
            blame(f"property {self.name}", line)
        return self.value


class Plain:
    size = 3

    def __init__(self) -> None:
        self.of = torch.ones(2)


Thing = hostile(Plain)


class Guide(nn.Module):
    """A module of the kind whose ``__getstate__`` lets go of what it cannot pickle."""

    note = Refusing()

    def __init__(self) -> None:
        super().__init__()
        self.prototype = {"trace": 1}
        self.things = [Thing(), {"a": Thing()}]

    def __getstate__(self) -> dict[str, Any]:
        self.prototype = None
        return self.__dict__.copy()

    def forward(self, x: Tensor) -> Tensor:
        assert self.prototype is not None, "somebody has pickled or copied it"
        return x * self.prototype["trace"]


class Closing(nn.Module):
    """Its instances are counted as they go."""

    gone = 0

    def __del__(self) -> None:
        type(self).gone += 1

    def forward(self, x: Tensor) -> Tensor:
        return x


class Block(nn.Module):
    shape = Refusing()

    def __init__(self, wide: int = 16) -> None:
        super().__init__()
        self.linear = nn.Linear(8, wide)
        self.norm = nn.BatchNorm1d(wide)
        self.thing = Thing()
        self.register_buffer("seen", torch.zeros(()))

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)

    def parameters(self, recurse: bool = True) -> Any:
        if (line := culprit()) is not None:
            blame("Block.parameters", line)
        return super().parameters(recurse)

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        if (line := culprit()) is not None:
            blame("Block.named_modules", line)
        return super().named_modules(*args, **kwargs)

    def forward(self, x: Tensor, *extra: Any, **more: Any) -> Tensor:
        self.seen.add_(1)
        return self.norm(self.linear(x)).relu()


@dataclasses.dataclass
class Output:
    logits: Tensor
    thing: Any = None


class Pair(NamedTuple):
    first: Tensor
    second: Any


class Loss(nn.Module):
    reduction = Refusing("mean")

    def forward(self, output: Any, target: Tensor) -> Tensor:
        return (output.logits.sum(1) - target).square().mean()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([hostile(Block)(), hostile(Block)()])
        self.head = nn.Linear(16, 4)
        self.closing = hostile(Closing)()
        self.bad = False

    def forward(self, batch: Any, *rest: Any, **named: Any) -> Any:
        x = batch["x"] if isinstance(batch, (Mapping, UserDict)) else batch.first
        x = self.blocks[0](x) + self.blocks[1](x, Thing(), thing=Thing())
        if self.bad:
            x = x / (x - x)
        x = self.head(self.closing(x))
        return hostile(Output)(x, Thing())


class Batch(OrderedDict):
    lengths = Refusing()


class Infinite:
    def __iter__(self) -> Any:
        while True:
            yield torch.ones(2)


class Endless(list):
    def __iter__(self) -> Any:
        while True:
            yield torch.ones(2)


class Adam(torch.optim.AdamW):
    """Keeps what it likes in its groups and its state."""

    notes = Refusing()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for group in self.param_groups:
            group["thing"], group["long"] = Thing(), "x" * 10_000

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and self.state[p]:
                    self.state[p]["thing"] = Thing()
        return super().step(closure)


class Wrapper(torch.optim.Optimizer):
    """Drives another optimizer, and has its groups and its state through properties."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.defaults: dict[str, Any] = {}
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self._patch_step_function()

    @property
    def param_groups(self) -> Any:
        if (line := culprit()) is not None:
            blame("Wrapper.param_groups", line)
        return self.inner.param_groups

    @property
    def state(self) -> Any:
        if (line := culprit()) is not None:
            blame("Wrapper.state", line)
        return self.inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


class Scaler(torch.amp.GradScaler):
    def is_enabled(self) -> bool:
        if (line := culprit()) is not None:
            blame("Scaler.is_enabled", line)
        return super().is_enabled()


class Scheduler(torch.optim.lr_scheduler.LambdaLR):
    pass


def batches(step: int, x: Tensor) -> Any:
    """Containers of every kind, one after the other."""
    kinds = (
        lambda: hostile(Batch)(x=x, thing=Thing()),
        lambda: {"x": x, "thing": Thing(), "y" * 10_000: x * 2},
        lambda: hostile(UserDict)({"x": x, "thing": Thing()}),
        lambda: hostile(Pair)(x, Thing()),
        lambda: hostile(dict)({"x": x, 3: [Thing(), x + 1]}),
    )
    return kinds[step % len(kinds)]()


def train(steps: int, kind: str, bad: int) -> None:
    torch.manual_seed(0)
    net = hostile(Net)()
    guide, loss_of = hostile(Guide)(), hostile(Loss)()
    optimizer: Any = hostile(Adam)(net.parameters(), lr=1e-2)
    scheduler = hostile(Scheduler)(optimizer, lambda step: 0.9**step)
    scaler = hostile(Scaler)("cpu", init_scale=4.0) if kind == "scaler" else None
    driver = Wrapper(optimizer) if kind == "wrapper" else optimizer
    things = {"thing": Thing(), "endless": Endless([torch.ones(2)]), "infinite": Infinite()}
    for step in range(steps):
        net.bad = step == bad
        x, target = torch.randn(4, 8), torch.randn(4)
        batch, lengths = batches(step, x), (torch.ones(2) for _ in range(3))
        local = hostile(list)([x, Thing()])
        output = net(batch, Endless([x]), things, key=Infinite())
        loss = guide(loss_of(output, target)) + target.exp().log().mean() * len(local)
        driver.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_((p for p in net.parameters()), 10.0)
            scaler.step(optimizer)
            scaler.update()
        else:
            torch.autograd.backward(each for each in (loss,))
            nn.utils.clip_grad_norm_(net.parameters(), 10.0)
            driver.step()
        scheduler.step()
        assert len(list(lengths)) == 3
        print(step, loss.item().hex(), flush=True)
    weights = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    print(hashlib.sha256(weights).hexdigest(), type(net.closing).__mro__[1].gone)


if __name__ == "__main__":
    train(int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
