"""Imported before what imports torchvision, so that its wheel loads beside a torch that lacks CUDA.

The compiled half of such a wheel does not load, and the pure half then fails as it registers shapes for ops that are
not there. With their signatures defined it imports; a script that needs one of these ops still fails. Does nothing
where torchvision loads by itself or is not installed.
"""

from __future__ import annotations

import contextlib
import sys

import torch

_SIGNATURES = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

try:
    with contextlib.suppress(ModuleNotFoundError):
        import torchvision
except RuntimeError:
    for _name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[_name]
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for _signature in _SIGNATURES:
        _library.define(_signature)
    import torchvision  # noqa: F401
