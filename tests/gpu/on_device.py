"""Runs a script that was written for the CPU on another device: ``python on_device.py DEVICE SCRIPT``.

Tensors are made on the CPU, so that its random numbers stay the same, and moved; ``"cpu"`` in the text (of autocast, of
GradScaler) becomes the device. Lines keep their numbers, and ops their callers.
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


def main(device, script):
    source = Path(script).read_text().replace('"cpu"', f'"{device}"')
    sys.argv = [script]
    sys.path.insert(0, str(Path(script).parent))
    makers = _device_constructors()
    for room in (torch, torch.fft, torch.signal.windows):
        for name, value in list(vars(room).items()):
            if callable(value) and value in makers:
                setattr(room, name, on(torch.device(device), value))
    names = {"__name__": "__main__", "__file__": script}
    exec(compile(source, script, "exec"), names)


if __name__ == "__main__":
    main(*sys.argv[1:3])
