"""The objects that a step hands to the drain thread: values on their way to the host. They keep no tensor alive."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from precdoctor.recording.kernels import Snapshot
from precdoctor.recording.slots.deferred import Deferred
from precdoctor.recording.slots.slot_table import Entry


def looks_like_a_scale(factor: float) -> bool:
    """Whether a factor at the root of a backward pass can only be a loss scale: a power of two from 16 up."""
    return 16 <= factor < math.inf and math.log2(factor).is_integer()


@dataclass
class OpBatch:
    """The list of ops of one step: columns of the ops table, without ``rank``."""

    step: int
    columns: dict[str, Any]
    rows: int


@dataclass(slots=True, eq=False)
class StepFacts:
    """The steps row while it is collected; see ``runlog.schema.STEPS``."""

    step: int
    optimizer: str = ""
    #: For an inference run, the model that was called; else empty.
    root: str = ""
    complete: bool = False
    wall_time: float = 0.0
    micro_steps: int = 0
    losses: list[Deferred] = field(default_factory=list)
    #: Number of losses, counted from the first, whose gradients were discarded before the step.
    thrown_losses: int = 0
    lrs: list[Deferred] = field(default_factory=list)
    #: Gradient norm if ``gradients_of`` is None; else it is computed from the rows of the weight gradients.
    grad_norm: Deferred = None
    #: Largest magnitude of the gradients in ``grad_norm``; non-finite exactly if one of them is.
    grad_amax: Deferred = None
    #: Whether ``grad_norm`` still carries the loss scale.
    grad_norm_scaled: bool = False
    #: Root, module and name of the optimizer's parameters; None unless every gradient of theirs has a row.
    gradients_of: frozenset[tuple[str, str, str]] | None = None
    clip_norm: float | None = None
    clipped_before_unscale: bool | None = None
    #: On sampled steps of a script that scales the loss by hand: norm of the gradients as the script began to clip
    #: them, and root, module and name of their parameters. Their rows were made before, as the backward pass ended.
    norm_at_clip: tuple[Deferred, frozenset[tuple[str, str, str]]] | None = None
    loss_scale: Deferred = None
    growth_tracker: Deferred = None
    found_inf: Deferred = None
    #: Whether a loss given to backward was FP16, whose range a loss scale can exceed.
    narrow_loss: bool = False
    #: Whether the optimizer's own step hook never fired.
    not_reached: bool = False
    #: Whether the script itself discarded the attempt: it dropped the gradients, or updated the scaler without a step.
    left_out: bool = False
    #: Whether the guard found the loss or gradients non-finite.
    bad: bool = False
    autocast_dtype: str | None = None
    sampled: bool = False
    #: Host time in our hooks, without the time spent waiting for the device.
    recorder_ns: int = 0
    wait_ns: int = 0
    #: Duration of the deep scan of this step, without the ops themselves; 0 if it was not scanned.
    scan_ns: int = 0
    step_ns: int = 0
    #: Constant factors found at the root of the backward passes: ``loss * 65536``, ``backward(torch.tensor(65536.0))``.
    root_factors: list[float] = field(default_factory=list)
    #: Of a step under a scaler: micro-steps known to begin at a loss without its scale. Indices of losses without the
    #: scale: those of these micro-steps, and losses whose backward pass was given the scale instead of 1.
    unscaled_passes: list[int] = field(default_factory=list)
    unscaled_losses: list[int] = field(default_factory=list)
    #: Launch counts per device at the end of each micro-step.
    micro_starts: list[dict[torch.device, int]] = field(default_factory=list)
    #: Where ``backward`` was called: the innermost frame outside torch.
    backward_file: str | None = None
    backward_line: int | None = None
    #: The list of the step's ops, if it is recorded.
    ops: OpBatch | None = None


@dataclass(slots=True, eq=False)
class StepBatch:
    """One step for the drain thread."""

    facts: StepFacts
    entries: list[Entry]
    snapshots: dict[torch.device, Snapshot]
    #: Number of tensors rows dropped while the step waited in the queue.
    dropped: int = 0
    #: Rows of host memory that the batch holds in the queue, those of slots that only other steps use included.
    rows_held: int = 0

    def give_up_tensors(self) -> None:
        """Release the memory behind the tensors rows and drop them; the steps row remains."""
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
