"""FP32 weights instead of 16-bit ones: the lines that widen only trained weights, and their cost in bytes."""

from __future__ import annotations

from collections.abc import Sequence

from precdoctor.diagnosis.analyses.parameters import count_of, states_per_parameter, stepped, trainable
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.survey.view import RunView

_FP32_BYTES = 4


def wide_weights(view: RunView, dtypes: Sequence[str]) -> str:
    """Return the snippet that makes the trained weights FP32 and computes under BF16 autocast; frozen weights stay."""
    return (
        f"import torch\n\n{_widen(view, dtypes)}\n"
        f"with torch.autocast({view.device!r}, dtype=torch.bfloat16):\n"
        "    loss = compute_loss(model, batch)\n"
    )


def _widen(view: RunView, dtypes: Sequence[str]) -> str:
    if not count_of(view, dtypes, trained=False):
        return "model = model.float()  # before the optimizer is made, which is then given these weights\n"
    lines = (
        "for parameter in model.parameters():  # before the optimizer is made\n"
        "    if parameter.requires_grad:  # the frozen ones stay as they are\n"
        "        parameter.data = parameter.data.float()\n"
    )
    if any("lora_" in name for name in trainable(view, dtypes)):
        lines += "# peft: get_peft_model(model, config) does so by itself; no model.bfloat16() or .half() after it\n"
    return lines


def fp32_weights(view: RunView, dtypes: Sequence[str]) -> str:
    """Return ``FP32 weights``, or, if some are frozen, ``FP32 for the 8 trained weights, not for the 24 frozen``."""
    frozen = count_of(view, dtypes, trained=False)
    trained = plural(count_of(view, dtypes, trained=True), "trained weight")
    return f"FP32 for the {trained}, not for the {frozen:,} frozen" if frozen else "FP32 weights"


def widened_bytes(view: RunView, elements: int, narrow_bytes: int = 2) -> int:
    """Return the additional bytes if ``elements`` weight elements become FP32.

    Weight, gradient and optimizer state have the weight's format. Autocast also holds a copy of the weight in the
    narrow format until the backward pass ends.
    """
    tensors = 2 + states_per_parameter(view)
    return elements * (tensors * (_FP32_BYTES - narrow_bytes) + narrow_bytes)


def widened_elements(view: RunView, dtypes: Sequence[str], least: int = 0) -> int:
    """Count the elements of the weights in these dtypes that an optimizer updates directly; at least ``least``."""
    return max(least, sum(stepped(view, dtypes).values()))
