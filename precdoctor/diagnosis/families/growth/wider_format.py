"""The wider format for an activation near the end of its own, chosen so that no later module narrows it again."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from precdoctor.diagnosis.claims import snippets
from precdoctor.diagnosis.claims.finding import Prescription
from precdoctor.diagnosis.survey.rows import FORWARD_KINDS, Key, TensorRow
from precdoctor.numerics.formats import BF16, FP32, Format

#: Classes of modules whose operands autocast narrows.
_NARROWS = re.compile(r"Linear|Conv|Bilinear|LSTM|GRU|RNN|MultiheadAttention")


@dataclass(frozen=True)
class Widening:
    """A change of format, as the parts of a prescription."""

    title: str
    change: Mapping[str, Any]
    to: Format
    snippet: str

    def prescription(self, effect: str, predicted: Mapping[str, Any]) -> Prescription:
        """Return the change as a prescription; ``effect`` ends its title."""
        return Prescription(f"{self.title}{effect}", self.change, predicted, self.snippet)


def widening(rows: Sequence[TensorRow], key: Key, dtype: str, device: str) -> Widening:
    """Return the change of format for the tensor ``key`` among the forward ``rows`` of one step.

    Normally FP32 for the module that makes the tensor. If the next module multiplies matrices, autocast narrows the
    tensor again, so only BF16 throughout helps. The input of a module is widened in the code before it.
    """
    forward = [r for r in rows if r.kind in FORWARD_KINDS and r.order is not None]
    at = next((i for i, r in enumerate(forward) if r.key == key), None)
    place = key[1] or key[0]
    follower = key[1] if key[2] == "input" else ""
    consumer = next((r for r in forward if r.module == follower and r.kind == "output"), None)
    if key[2] != "input" and at is not None:
        consumer = next((r for r in forward[at + 1 :] if not r.module.startswith(f"{key[1]}.")), None)
    if dtype == "float16" and consumer is not None and _NARROWS.search(consumer.module_class):
        change: dict[str, Any] = {"autocast_dtype": {"from": dtype, "to": "bfloat16"}}
        return Widening("use BF16 autocast", change, BF16, snippets.bfloat16_autocast(device))
    change = {"module": key[1], "dtype": {"from": dtype, "to": "float32"}}
    if key[2] == "input":
        before = forward[at - 1].place if at else "the model's input"
        title = f"run the code from `{before}` to `{place}` in FP32"
        return Widening(title, change, FP32, snippets.code_in_float32(before, place, device))
    return Widening(f"run `{place}` in FP32", change, FP32, snippets.run_in_float32(key[1], device))
