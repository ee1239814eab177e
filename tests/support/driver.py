"""A stand-in for CUDA's driver below Triton: kernels are compiled for a GPU and launched into nothing.

Slots stay empty, so what is found in a recorded run means nothing. What the recorder asks of its kernels is shown:
tensors whose tiles cannot be laid out, constants that do not compile, arguments that no launcher would take.
"""

from __future__ import annotations

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

#: Arguments of every launch, behind the grid.
LAUNCHED: list[tuple[object, ...]] = []


class _Launcher:
    def __init__(self, *_: object) -> None:
        self.launch = self

    def __call__(self, *given: object) -> None:
        LAUNCHED.append(given)


class _Utils:
    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 1 << 16}

    def load_binary(self, *_: object) -> tuple[int, int, int, int, int]:
        return 1, 2, 64, 0, 1024  # module, function, registers, spills, threads of a program at most


class _Driver:
    utils, launcher_cls = _Utils(), _Launcher

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_device_interface(self) -> object:
        return torch.cuda


def install() -> None:
    """Have Triton of this process compile for an H100."""
    driver.set_active(_Driver())
