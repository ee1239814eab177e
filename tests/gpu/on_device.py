"""Runs a script that was written for the CPU on another device: ``python on_device.py DEVICE SCRIPT``.

Tensors are made on the CPU, so that its random numbers stay the same, and moved; ``"cpu"`` in the text (of autocast, of
GradScaler) becomes the device. Lines keep their numbers.
"""

import sys
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors


class OnDevice(TorchFunctionMode):
    """Whatever makes a tensor of nothing makes it on the CPU and moves it."""

    def __init__(self, device):
        super().__init__()
        self._device, self._makers = device, _device_constructors()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func not in self._makers or (kwargs or {}).get("device") is not None:
            return made
        return made.detach().to(self._device).requires_grad_(made.requires_grad)


def main(device, script):
    source = Path(script).read_text().replace('"cpu"', f'"{device}"')
    sys.argv = [script]
    sys.path.insert(0, str(Path(script).parent))
    names = {"__name__": "__main__", "__file__": script}
    with OnDevice(torch.device(device)):
        exec(compile(source, script, "exec"), names)


if __name__ == "__main__":
    main(*sys.argv[1:3])
