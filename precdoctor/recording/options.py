"""The recorder's options: one frozen value, passed from the parent to every child as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from precdoctor.errors import UsageError

#: Set by ``record`` to the absolute run directory. Without it the boot module does nothing.
RUN_VARIABLE = "PRECDOCTOR_RUN"
#: Holds :class:`RecordOptions` as JSON.
OPTIONS_VARIABLE = "PRECDOCTOR_OPTIONS"
#: Values of ``on_nonfinite``.
POLICIES = ("examine", "stop", "skip", "observe")


@dataclass(frozen=True)
class RecordOptions:
    """Recorder options; sizes in bytes, steps in optimizer-step attempts.

    Raises:
        UsageError: a value is not allowed.
    """

    #: Full statistics on every N-th step (N a power of two); step counters and events are kept on all. None: chosen
    #: automatically to stay within ``budget``.
    every: int | None = None
    #: Maximum recording overhead, as a fraction of training time.
    budget: float = 0.01
    #: Record only steps in ``[first, last)``; None: no limit on that side.
    steps: tuple[int | None, int | None] = (None, None)
    #: Record only these ranks; None: all.
    ranks: tuple[int, ...] | None = None
    #: Module globs (FQN below the root); empty: all.
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    #: Kinds of rows; empty: all. No flag sets it: benchmarks use it to compare with recorders of fewer kinds.
    kinds: tuple[str, ...] = ()
    #: Number of the first step, for a run that resumes.
    first_step: int = 0
    #: Reaction to a non-finite loss or gradient: examine | stop | skip | observe.
    on_nonfinite: str = "examine"
    #: Trace every op of the steps ``[first, last)`` live; the run ends after the first bad one. No flag sets it:
    #: ``precdoctor autopsy`` does.
    trace_steps: tuple[int, int] | None = None
    #: End the run after this many steps; None: never. No flag of record sets it: ``precdoctor trial`` does.
    max_steps: int | None = None
    #: Compare chosen steps with this wide reference, fp32 or fp64; None: none. No flag of record sets this or the next
    #: three options: ``precdoctor shadow`` does.
    shadow: str | None = None
    #: Compare these steps; empty: every ``shadow_every``-th attempt of each optimizer, or attempts 0, 1, 4, 16, 64 ...
    shadow_at: tuple[int, ...] = ()
    shadow_every: int | None = None
    #: Compare only steps in ``[first, last)``; None: no limit on that side.
    shadow_steps: tuple[int | None, int | None] = (None, None)
    #: Trace this many steps after an incident whose op was not found.
    arm_next: int = 0
    #: Number of healthy steps whose ops are audited one by one; 0: none; None: a few, within the budget.
    deep_scan: int | None = None
    #: Steps whose every op is listed, with fingerprints of its inputs and outputs.
    ops: tuple[int, ...] = ()
    #: How ``torch.compile`` is recorded: boundary (calls of compiled models) | instrument (also the modules inside,
    #: which changes their rounding).
    compiled: str = "boundary"
    #: Bytes per rank and step for update rows and replays; None: 256 MiB, but for replays at least 2 % of a GPU's
    #: memory.
    scene_memory: int | None = None
    #: Stop writing when a rank directory reaches this size (training continues); None: no limit.
    max_disk: int | None = None
    #: Keep source text, argv and offending values out of the log.
    redact_names: bool = False
    #: Changes to make to the training, each as JSON of :class:`precdoctor.runlog.changes.Change`; they end neutrality.
    apply: tuple[Mapping[str, Any], ...] = ()
    #: Whether the parent may request a stop of the run (``--halt-on``).
    may_halt: bool = False
    #: Also record a process that never trains: each call of a top-level model is one of its steps.
    inference: bool = False
    #: An internal error of the recorder stops the run instead of turning recording off.
    strict: bool = False

    def __post_init__(self) -> None:
        if self.every is not None and (self.every < 1 or self.every & (self.every - 1)):
            raise UsageError(f"--every takes a power of two (1, 2, 4, 8 ...), got {self.every}")
        first, last = self.steps
        if (first is not None and first < 0) or (last is not None and last <= (first or 0)):
            raise UsageError(f"--steps takes a half-open range A:B with A < B, got {first}:{last}")
        if not 0 < self.budget <= 1:
            raise UsageError(f"--budget takes a percentage above 0 and up to 100%, got {self.budget:.6%}")
        if self.ranks is not None and (not self.ranks or min(self.ranks) < 0):
            raise UsageError(f"--ranks takes all, or ranks from 0 such as 0,3, got {self.ranks}")
        if self.on_nonfinite not in POLICIES:
            raise UsageError(
                f"--on-nonfinite takes {', '.join(POLICIES[:-1])} or {POLICIES[-1]}, got {self.on_nonfinite!r}"
            )
        if self.max_steps is not None and self.max_steps < 1:
            raise UsageError(f"--steps takes a number of steps from 1, got {self.max_steps}")
        if self.shadow not in (None, "fp32", "fp64"):
            raise UsageError(f"--reference takes fp32 or fp64, got {self.shadow!r}")
        if self.shadow_every is not None and self.shadow_every < 1:
            raise UsageError(f"--every takes a number of steps from 1, got {self.shadow_every}")
        _check_steps(("--at", self.shadow_at), ("--ops", self.ops))
        if self.arm_next < 0:
            raise UsageError(f"--arm-next takes a number of steps from 0, got {self.arm_next}")
        if self.deep_scan is not None and self.deep_scan < 0:
            raise UsageError(f"--deep-scan takes a number of steps, or off, got {self.deep_scan}")
        if self.compiled not in ("boundary", "instrument"):
            raise UsageError(f"--compiled takes boundary or instrument, got {self.compiled!r}")
        if self.first_step < 0:
            raise UsageError(f"--first-step takes a step number from 0, got {self.first_step}")

    @property
    def bit_neutral(self) -> bool:
        """Whether training is bitwise identical to training without recording."""
        return not self.apply and self.on_nonfinite != "skip" and self.compiled == "boundary"

    def takes(self, kind: str) -> bool:
        """Return whether rows of this kind are to be recorded."""
        return not self.kinds or kind in self.kinds

    def to_json(self) -> str:
        """Return the options as one line of JSON, for the environment variable."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RecordOptions:
        """Return the options of :meth:`to_json`'s result; unknown keys are ignored.

        Raises:
            UsageError: the text is not the JSON of recorder options.
        """
        try:
            data: Mapping[str, Any] = json.loads(text)
            known = {f.name for f in dataclasses.fields(cls)}
            fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k in known}
            return cls(**fields)
        except (TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"{OPTIONS_VARIABLE} does not hold recorder options: {error}") from error


def _check_steps(*given: tuple[str, tuple[int, ...]]) -> None:
    """Refuse negative step numbers; takes pairs of a flag and its steps."""
    for flag, steps in given:
        if min(steps, default=0) < 0:
            raise UsageError(f"{flag} takes step numbers from 0, got {min(steps)}")
