"""What one step hands to the drain thread: values on their way to the host, nothing that holds a tensor alive."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from precdoctor.recording.kernels import Snapshot
from precdoctor.recording.slots.deferred import Deferred
from precdoctor.recording.slots.slot_table import Entry


def looks_like_a_scale(factor: float) -> bool:
    """Whether a factor at the root of a backward pass can be nothing else: a power of two from 16 up."""
    return 16 <= factor < math.inf and math.log2(factor).is_integer()


@dataclass
class OpBatch:
    """The list of ops of one step: columns of the ops table, ``rank`` left out."""

    step: int
    columns: dict[str, Any]
    rows: int


@dataclass(slots=True, eq=False)
class StepFacts:
    """The steps row in the making; see ``runlog.schema.STEPS``."""

    step: int
    optimizer: str = ""
    #: Of an inference run, the model that was called; else empty.
    root: str = ""
    complete: bool = False
    wall_time: float = 0.0
    micro_steps: int = 0
    losses: list[Deferred] = field(default_factory=list)
    #: So many of them are of gradients that were thrown away before the step.
    thrown_losses: int = 0
    lrs: list[Deferred] = field(default_factory=list)
    #: Sampled steps take the norm from the weight gradients' rows; the others carry it here.
    grad_norm: Deferred = None
    #: Largest magnitude among those gradients; not finite exactly if one of them is not.
    grad_amax: Deferred = None
    #: They still carried the loss scale.
    grad_norm_scaled: bool = False
    #: Root, module and name of the optimizer's parameters; null when not every gradient of theirs has a row.
    gradients_of: frozenset[tuple[str, str, str]] | None = None
    clip_norm: float | None = None
    clipped_before_unscale: bool | None = None
    loss_scale: Deferred = None
    growth_tracker: Deferred = None
    found_inf: Deferred = None
    #: A loss given to backward was FP16, whose range a loss scale can leave.
    narrow_loss: bool = False
    #: The optimizer's own step hook never fired.
    not_reached: bool = False
    #: The script gave the attempt up by itself: it threw the gradients away, or updated the scaler without a step.
    left_out: bool = False
    #: The guard has found its loss or gradients not finite.
    bad: bool = False
    autocast_dtype: str | None = None
    sampled: bool = False
    #: Host time in our hooks, without what they waited for the device.
    recorder_ns: int = 0
    wait_ns: int = 0
    #: Of a step that was scanned: what that took, without the ops themselves.
    scan_ns: int = 0
    step_ns: int = 0
    #: Constant factors found at the root of the backward passes (``loss * 65536``).
    root_factors: list[float] = field(default_factory=list)
    #: Launch counts per device at the beginning of each micro-step but the first.
    micro_starts: list[dict[torch.device, int]] = field(default_factory=list)
    #: Where ``backward`` was called, outside torch.
    backward_file: str | None = None
    backward_line: int | None = None
    #: Every op of the step, where it is listed.
    ops: OpBatch | None = None


@dataclass(slots=True, eq=False)
class StepBatch:
    """One step for the drain thread."""

    facts: StepFacts
    entries: list[Entry]
    snapshots: dict[torch.device, Snapshot]
    #: Tensors rows given up while the step waited in the queue.
    dropped: int = 0
    #: In the queue: rows of memory on the host that it holds, of slots that only other steps use among them.
    rows_held: int = 0

    def give_up_tensors(self) -> None:
        """Let go of what the tensors rows would have been made from; the steps row stays."""
        self.dropped += len(self.entries)
        self.release()

    def release(self) -> None:
        """Give the memory of the tensors rows back."""
        for snapshot in self.snapshots.values():
            snapshot.release()
        self.entries, self.snapshots = [], {}


@dataclass
class EventBatch:
    """Events that belong to no step's rows."""

    events: list[dict[str, Any]]
