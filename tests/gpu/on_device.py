"""Runs a script that was written for the CPU on another device: ``python on_device.py DEVICE SCRIPT``.

Tensors are made and filled on the CPU, so that its random numbers stay the same (but for dropout), and moved; ``"cpu"``
in the text (of autocast, of GradScaler) becomes the device. Lines keep their numbers, and ops their callers.
"""

import functools
import sys
from pathlib import Path

import torch
from torch.utils._device import _device_constructors


def on(device, make):
    """``make``, whose tensor is moved to ``device`` unless the caller names one."""

    @functools.wraps(make)
    def made_there(*args, **kwargs):
        made = make(*args, **kwargs)
        if kwargs.get("device") is not None:
            return made
        return made.detach().to(device).requires_grad_(made.requires_grad)

    return made_there


def filled(fill):
    """``fill``, a method that draws a tensor's values in place, done on the CPU."""

    @functools.wraps(fill)
    def filled_there(x, *args, **kwargs):
        with torch.no_grad():
            return x.copy_(fill(x.detach().cpu(), *args, **kwargs))

    return filled_there


def drawn_like(draw):
    """``draw``, a function that draws values of another tensor's shape, done on the CPU."""

    @functools.wraps(draw)
    def drawn_there(like, *args, **kwargs):
        return draw(like.detach().cpu(), *args, **kwargs).to(like.device)

    return drawn_there


def main(device, script):
    source = Path(script).read_text().replace('"cpu"', f'"{device}"')
    sys.argv = [script]
    sys.path.insert(0, str(Path(script).parent))
    makers = _device_constructors()
    for room in (torch, torch.fft, torch.signal.windows):
        for name, value in list(vars(room).items()):
            if callable(value) and value in makers:
                setattr(room, name, on(torch.device(device), value))
    for name in ("uniform_", "normal_", "random_", "bernoulli_", "exponential_", "log_normal_"):
        setattr(torch.Tensor, name, filled(getattr(torch.Tensor, name)))
    for name in ("rand_like", "randn_like", "randint_like", "bernoulli", "multinomial"):
        setattr(torch, name, drawn_like(getattr(torch, name)))
    names = {"__name__": "__main__", "__file__": script}
    exec(compile(source, script, "exec"), names)


if __name__ == "__main__":
    main(*sys.argv[1:3])
