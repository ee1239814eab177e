"""How gradients are put together over the ranks: by which wrapper, in which format."""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any

from torch import nn

from precdoctor.recording.model import static
from precdoctor.recording.ops.tensor_facts import dtype_name
from precdoctor.recording.process import attach

#: Communication hooks of torch that send another format than the gradient's, by a part of their name.
_HOOKS = {"fp16_compress": "float16", "bf16_compress": "bfloat16"}


def reduction(outer: nn.Module | None, inner: nn.Module) -> dict[str, Any] | None:
    """``wrapper``, ``ranks``, ``hook`` and ``dtype`` (null: that of the gradients); null where nothing is reduced.

    Args:
        outer: the module as it is called, when it is a wrapper.
        inner: the model in it.
    """
    if not attach.is_distributed():
        return None
    ranks = int(sys.modules["torch.distributed"].get_world_size())
    if outer is not None and type(outer).__name__ == "DistributedDataParallel":
        hooks = static.elements(static.attribute(outer, "_comm_hooks"))
        names = [hook[0].__qualname__ if type(hook[0]) is FunctionType else type(hook[0]).__name__ for hook in hooks]
        hook = names[-1] if names else None
        dtype = next((d for part, d in _HOOKS.items() if hook is not None and part in hook), None)
        return {"wrapper": "DistributedDataParallel", "ranks": ranks, "hook": hook, "dtype": dtype}
    if outer is not None and type(outer).__name__ == "FullyShardedDataParallel":
        return {"wrapper": "FullyShardedDataParallel", **_sharded(ranks, static.attribute(outer, "mixed_precision"))}
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not issubclass(type(inner), getattr(fsdp, "FSDPModule", ())):
        return None
    state: Any = fsdp.FSDPModule._get_fsdp_state(inner)
    return {"wrapper": "fully_shard", **_sharded(ranks, static.attribute(state, "_mp_policy"))}


def _sharded(ranks: int, policy: Any) -> dict[str, Any]:
    dtype = static.attribute(policy, "reduce_dtype")
    return {"ranks": ranks, "hook": None, "dtype": None if dtype is None else dtype_name(dtype)}
