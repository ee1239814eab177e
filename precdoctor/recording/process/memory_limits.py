"""How much memory the recorder may use, and whether a GPU has enough left to replay a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch

from precdoctor.recording.options import RecordOptions

#: Bytes, if ``--scene-memory`` is not given.
DEFAULT = 256 << 20
#: Share of a GPU's memory that a scene may hold there: the logits of a large vocabulary are that large.
_SHARE = 0.02
_GIB = 1 << 30
CUDA: Final = vars(torch.cuda)


def for_scene(options: RecordOptions) -> float:
    """Return the most bytes of tensors to hold for a replay. Training makes them anyway; they are only freed later."""
    if options.scene_memory is not None:
        return options.scene_memory
    if not CUDA.get("_initialized", True) or not torch.cuda.is_initialized():  # the flag answers without a call
        return DEFAULT
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return max(DEFAULT, int(_SHARE * total))


def for_copies(options: RecordOptions) -> int:
    """Return the bytes that copies of weights, and of tensors that a scan follows, may take."""
    return DEFAULT if options.scene_memory is None else options.scene_memory


def lack(devices: Iterable[torch.device]) -> str | None:
    """Return why a step cannot be replayed on these devices without filling their memory; None if it can.

    A replay is assumed to need as much as the training's peak needed on top of its current use.
    """
    for device in sorted({d for d in devices if d.type == "cuda"}, key=str):
        now = torch.cuda.memory_allocated(device)
        needed = torch.cuda.max_memory_allocated(device) - now
        room = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - now
        if needed > room:
            left = f"{device} has {room / _GIB:.1f} GiB left"
            return f"not enough device memory: a replay may need {needed / _GIB:.1f} GiB, and {left}"
    return None
