"""What a script prints at its end: one line per number that recording must not change."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from typing import Any


def weights_digest(*models: Any) -> str:
    """sha256 over names, shapes, dtypes and bytes of every tensor of the models' state, in the order of the names."""
    import torch

    digest = hashlib.sha256()
    for model in models:
        state: Mapping[str, Any] = model if isinstance(model, Mapping) else model.state_dict()
        for name, value in sorted(state.items()):
            if isinstance(value, torch.Tensor):
                held = _plain(value)
                digest.update(f"{name} {tuple(held.shape)} {held.dtype}".encode())
                digest.update(held.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _plain(tensor: Any) -> Any:
    """A contiguous copy on the CPU: whole where it is sharded, dequantized where it is quantized."""
    import torch

    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    if hasattr(tensor, "dequantize") and type(tensor) not in {torch.Tensor, torch.nn.Parameter}:
        tensor = tensor.dequantize()
    return tensor.detach().cpu().contiguous()


def finish(losses: Iterable[Any], *models: Any) -> None:
    """Prints the digests of the losses and of the models' final weights, and the first and the last loss."""
    values = [float(loss) for loss in losses]
    written = "\n".join(value.hex() for value in values)
    rank = os.environ.get("RANK", "0")
    lines = [
        f"rank {rank} losses {len(values)} {hashlib.sha256(written.encode()).hexdigest()}",
        f"rank {rank} weights {weights_digest(*models)}",
    ]
    if values:
        lines.append(f"rank {rank} from {values[0]:.6g} to {values[-1]:.6g}")
    os.write(1, ("\n".join(lines) + "\n").encode())  # in one write: ranks share this pipe
