"""Fast path for lists of tensors that are read every step and differ from step to step only in their addresses."""

from __future__ import annotations

import array
import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from precdoctor.recording.kernels import native_cpu
from precdoctor.recording.kernels.cuda import stream_of
from precdoctor.recording.kernels.device_look import DeviceLook
from precdoctor.recording.kernels.outside_user_modes import apart_from_user_modes
from precdoctor.recording.process import attach

_BASE: Any = torch._C.TensorBase
_DTYPE, _ADDRESS, _NUMEL = _BASE.dtype.__get__, _BASE.data_ptr, _BASE.numel


def _tensor_guards() -> Callable[..., Any] | None:
    """Return Dynamo's check of many tensors (class, kind, dtype, device, shape, strides); None if it is unusable."""
    kind: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)
    try:
        with apart_from_user_modes():
            one, other = torch.zeros(2, 3), torch.zeros(4)
            same = kind(one, other, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
            wrong = (
                (one, other.double()),
                (one.t(), other),
                (torch.zeros(3, 3), other),
                (one, torch.zeros(8)[::2]),
                (one, None),
                (one, torch.nn.Parameter(other)),
                (one, torch.zeros(4, device="meta")),
                (one, torch.zeros(4).to_sparse()),
            )
            works = same(torch.ones(2, 3), torch.ones(4)) is True and not any(same(*tensors) for tensors in wrong)
    except Exception as error:  # noqa: BLE001 - whatever a private class of another torch makes of this
        attach.let_through(error)
        return None
    return kind if works else None


class Layout:
    """The properties of a list of tensors at its last full check, in which :func:`native_cpu.look` queries each tensor.

    The gradients of a training are new tensors at new addresses in every step, but usually have the same properties.
    One call of C confirms this, and then only their addresses are queried.
    """

    #: Lists that change from step to step (a mixture of experts) are no longer learned after so many changes.
    _MAX_CHANGES: Final = 16
    _guards: Callable[..., Any] | None = None
    _tried = False

    def __init__(self) -> None:
        self._has_properties: Callable[..., bool] | None = None
        self._numel = array.array("q")
        self._count, self._code, self._changes = 0, 0, 0
        self._on_device: DeviceLook | None = None

    def look(self, tensors: Sequence[Any]) -> tuple[float, float] | Tensor | None:
        """Return the result of :func:`native_cpu.look`, or on a GPU of :meth:`DeviceLook.look`.

        Call outside of torch.func. None if properties or stream changed, memory was freed, or the kernel cannot run.
        """
        if self._has_properties is None or len(tensors) != self._count or not self._has_properties(*tensors):
            return None
        addresses = list(map(_ADDRESS, tensors))
        if self._on_device is not None:
            with apart_from_user_modes():
                found = self._on_device.look(addresses, stream_of(tensors[0])) if all(addresses) else None
            if found is None:  # another stream, memory that was freed, or a kernel that does not compile
                self._has_properties = None
            return found
        if min(addresses) < native_cpu.LOWEST:
            return None
        out = (ctypes.c_double * 2)()
        native_cpu.look_at(array.array("q", addresses), self._numel, self._code, out)
        return out[0], out[1]

    def learn(self, tensors: Sequence[Tensor]) -> None:
        """Store the properties of a list of plain tensors that :func:`native_cpu.look` accepted or that is on a GPU."""
        if self._changes >= self._MAX_CHANGES:
            return
        self._changes += 1
        self._has_properties, self._on_device = None, None
        if not Layout._tried:
            Layout._tried, Layout._guards = True, _tensor_guards()
        if Layout._guards is None:
            return
        kinds, sizes = set(map(_DTYPE, tensors)), list(map(_NUMEL, tensors))
        if not tensors[0].is_cpu:
            if not DeviceLook.fits(tensors):
                return
            with apart_from_user_modes():
                self._on_device = DeviceLook(tensors)
        elif len(kinds) > 1 or not all(sizes):
            return
        else:
            self._numel, self._code = array.array("q", sizes), native_cpu.CODES[kinds.pop()]
        self._count = len(tensors)
        self._has_properties = Layout._guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
