"""A second device, for tests of code that meets tensors of two: their memory is the CPU's, and ops refuse to mix them.

Inside ``with TwoDevices() as devices`` tensors that ``devices.cast`` or ``devices.put`` has moved say that they are on
``cuda:0``, and so do those computed from them. An op on tensors of both raises what torch raises.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from precdoctor.recording import kernels

THERE = torch.device("cuda", 0)
_true_device = torch._C.TensorBase.device.__get__
_true_to = Tensor.to
_FACTORIES = ("empty", "empty_strided", "zeros", "ones", "full", "tensor", "arange")
#: Ops that move numbers from one device to another.
_MOVES = ("_to_copy", "copy_")


class TwoDevices(TorchDispatchMode):
    """Knows the memory that is on the second device."""

    #: What the recorder does runs under this mode, too.
    ignores_ours = True

    def __init__(self) -> None:
        super().__init__()
        self._there: dict[int, StorageWeakRef] = {}
        self._target: bool | None = None
        self._patches = contextlib.ExitStack()

    def __enter__(self):
        devices = self

        def to(x: Tensor, *args, **kwargs) -> Tensor:
            given = next((a for a in (*args, kwargs.get("device")) if isinstance(a, torch.device)), None)
            if given is None:
                return _true_to(x, *args, **kwargs)
            kwargs.pop("device", None)
            rest = [a for a in args if not isinstance(a, torch.device)]
            return devices._moved(x, given == THERE, *rest, **kwargs)

        def made(true):
            def make(*args, device=None, **kwargs) -> Tensor:
                there = device is not None and torch.device(device) == THERE
                result = true(*args, **kwargs, **({} if device is None or there else {"device": device}))
                return devices._put(result, there)

            return make

        device = property(lambda x: THERE if devices.holds(x) else _true_device(x))
        measured = kernels.measured
        for owner, name, new in (
            (Tensor, "device", device),
            (Tensor, "to", to),
            (kernels, "measured", lambda x, **how: measured(self._put(x.clone(), False), **how)),
            *((torch, name, made(getattr(torch, name))) for name in _FACTORIES),
        ):
            self._patches.enter_context(mock.patch.object(owner, name, new))
        super().__enter__()
        return self

    def __exit__(self, *args) -> None:
        super().__exit__(*args)
        self._patches.close()

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """What ``x.to("cuda", dtype)`` gives: one op."""
        return self._moved(x, True, dtype)

    def put(self, *tensors: Tensor) -> None:
        """Have tensors be there from now on."""
        for x in tensors:
            self._put(x, True)

    def holds(self, x: Tensor) -> bool:
        found = self._there.get(x.untyped_storage()._cdata)
        return found is not None and not found.expired()

    def _moved(self, x: Tensor, there: bool, *args, **kwargs) -> Tensor:
        self._target = there
        try:
            result = _true_to(x, *args, **kwargs)
            return self._put(result.clone(), there) if self.holds(result) != there else result
        finally:
            self._target = None

    def _put(self, x: Tensor, there: bool) -> Tensor:
        storage = x.untyped_storage()
        if there:
            self._there[storage._cdata] = StorageWeakRef(storage)
        else:
            self._there.pop(storage._cdata, None)
        return x

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        given = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        places = {self.holds(x) for x in given if x.dim()}
        takes_host = name in ("index", "index_put_") and self.holds(given[0])  # as indices
        if len(places) > 1 and name not in _MOVES and not takes_host:
            raise RuntimeError("Expected all tensors to be on the same device, but found cuda:0 and cpu")
        result = func(*args, **(kwargs or {}))
        there = self.holds(args[0]) if name == "copy_" else any(map(self.holds, given))
        if name == "_to_copy" and self._target is not None:
            there = self._target
        for x in torch.utils._pytree.tree_leaves(result):
            if isinstance(x, Tensor) and given:
                self._put(x, there)
        return result
