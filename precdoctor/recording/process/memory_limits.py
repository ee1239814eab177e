"""How much memory the recorder may take, and whether a GPU has enough of it left to run a step again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch

from precdoctor.recording.options import RecordOptions

#: Bytes, where ``--scene-memory`` is not given.
DEFAULT = 256 << 20
#: Share of a GPU's memory that a scene may keep there: logits of a large vocabulary are that large.
_SHARE = 0.02
_GIB = 1 << 30
CUDA: Final = vars(torch.cuda)


def for_scene(options: RecordOptions) -> float:
    """Bytes of tensors that a step may keep for a replay; they exist anyway, and are only freed later."""
    if options.scene_memory is not None:
        return options.scene_memory
    if not CUDA.get("_initialized", True) or not torch.cuda.is_initialized():  # the first is the same, without a call
        return DEFAULT
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return max(DEFAULT, int(_SHARE * total))


def for_copies(options: RecordOptions) -> int:
    """Bytes that copies may take, of weights and of what a scan follows."""
    return DEFAULT if options.scene_memory is None else options.scene_memory


def lack(devices: Iterable[torch.device]) -> str | None:
    """Why a step had better not be run again on these devices: the training would meet a full memory.

    A replay is taken to need what the training's peak needed beside the memory that is in use now.
    """
    for device in sorted({d for d in devices if d.type == "cuda"}, key=str):
        now = torch.cuda.memory_allocated(device)
        needed = torch.cuda.max_memory_allocated(device) - now
        room = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - now
        if needed > room:
            left = f"{device} has {room / _GIB:.1f} GiB left"
            return f"not enough device memory: a replay may need {needed / _GIB:.1f} GiB, and {left}"
    return None
