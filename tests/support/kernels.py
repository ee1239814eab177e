"""The kernels by the slot's tensors, as the reference takes them, not by addresses."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from precdoctor.recording.kernels import native_cpu


def measure_native(x: Tensor, ints: Tensor, floats: Tensor, counter: Tensor, blocks: Sequence[int]) -> None:
    native_cpu.measure_at(x, ints.data_ptr(), floats.data_ptr(), counter.data_ptr(), native_cpu.wanted(blocks))


def measure_triton(
    x: Tensor, ints: Tensor, floats: Tensor, counter: Tensor, blocks: Sequence[int], *, fingerprint: bool = True
) -> None:
    from precdoctor.recording.kernels import triton_kernel  # where Triton is installed

    want = native_cpu.wanted(blocks) | 8 * fingerprint
    triton_kernel.measure_at(x, ints.data_ptr(), floats.data_ptr(), counter.data_ptr(), want)
