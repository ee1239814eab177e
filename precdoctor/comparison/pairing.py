"""Two runs side by side: the same tensors on the same steps, or why there are none to speak of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from precdoctor.comparison.renames import Module, overridden, renamed, translated
from precdoctor.diagnosis.rows import Key, TensorRow, integer, known_format
from precdoctor.diagnosis.view import BAD_COUNTS, Process, RunView, records
from precdoctor.numerics.tail import flushed_tail

#: Common steps whose tensors are compared, evenly spread. Bounds the work, not the meaning.
MAX_STEPS = 64
#: Below this share of common tensors (of weights: of equal shape) two runs are of different models.
SAME_MODEL = 0.5

_COLUMNS = (
    *("root", "module", "module_class", "kind", "name", "call", "phase", "dtype", "shape", "numel", "order"),
    *(*BAD_COUNTS, "zero", "at_max", "amax", "amin_nonzero", "exp_lo", "exp_hist", "unchanged", "scale"),
)
_KINDS = ("batch", "input", "output", "grad_output", "weight", "weight_grad", "weight_grad_step", "update", "loss")


@dataclass
class Summary:
    """One tensor over the common steps of one run, all ranks together."""

    dtype: str
    shape: tuple[int, ...]
    module_class: str
    #: Sums over steps and ranks.
    numel: int = 0
    flushed: float = 0.0
    alive: float = 0.0
    at_max: int = 0
    intended: int = 0
    unchanged: int = 0
    amax: float = 0.0
    badness: set[str] = field(default_factory=set)
    first_bad_step: int | None = None

    @property
    def flushed_share(self) -> float:
        """Of the intended non-zero elements; the estimator is that of PD201."""
        total = self.flushed + self.alive
        return self.flushed / total if total else 0.0

    @property
    def at_max_share(self) -> float:
        """Elements exactly at the dtype's maximum."""
        return self.at_max / self.numel if self.numel else 0.0

    @property
    def lost_share(self) -> float:
        """Lost among the intended updates."""
        return self.unchanged / self.intended if self.intended else 0.0

    @property
    def headroom(self) -> float | None:
        """Binades between the largest amax and the dtype's maximum."""
        fmt = known_format(self.dtype)
        return fmt.headroom(self.amax) if fmt is not None and self.amax > 0.0 else None


@dataclass(frozen=True)
class Pairing:
    """What two runs have in common.

    Attributes:
        steps: all common steps, sampled or not.
        found, expected: per tensor its summary in the run and in the baseline, over the common sampled steps.
        losses: ``(step, found, expected)`` on the common steps, mean over ranks.
        names: modules of the run that go by another name in the baseline.
    """

    steps: Sequence[int]
    sampled: Sequence[int]
    found: Mapping[Key, Summary]
    expected: Mapping[Key, Summary]
    losses: Sequence[tuple[int, float, float]]
    names: Mapping[Module, Module] = field(default_factory=dict)

    @property
    def common(self) -> Iterator[tuple[Key, Summary, Summary]]:
        """Tensors of both, as (key, found, expected)."""
        return ((k, s, self.expected[k]) for k, s in self.found.items() if k in self.expected)


def subject(key: Key) -> str:
    """How a line calls a tensor: ``GPT#0 blocks.3.attn output``."""
    root, module, kind, name, call = key
    words = [root, module, kind, name, f"call {call}" if call else ""]
    return " ".join(w for w in words if w)


def pair(run: RunView, baseline: RunView, renames: Sequence[tuple[str, str]] = ()) -> Pairing | str:
    """Pair two runs; a sentence instead when they cannot be compared.

    Args:
        renames: ``(prefix in the run, prefix in the baseline)`` of module names; other renamed modules are matched by
            class, shapes and order.
    """
    ours, theirs = _usable(run), _usable(baseline)
    steps = sorted(ours.keys() & theirs.keys())
    if not steps:
        return (
            f"no common steps: the run has steps {_span(ours)}, the baseline {_span(theirs)}; "
            "record both from the same first step"
        )
    sampled = [s for s in steps if ours[s] and theirs[s]]
    if not sampled:
        return "no common step was sampled in both runs; record both with the same --every"
    chosen = sampled[:: max(1, math.ceil(len(sampled) / MAX_STEPS))]
    found, expected = _summaries(run, chosen), _summaries(baseline, chosen)
    names = overridden(found, renames)
    names |= renamed(translated(found, names), expected)
    found = translated(found, names)
    different = _different_model(found, expected)
    if different is not None:
        return different
    return Pairing(steps, chosen, found, expected, list(_losses(run, baseline, steps)), names)


def _usable(view: RunView) -> dict[int, bool]:
    """Complete steps, with whether every process sampled them."""
    usable: dict[int, bool] = {}
    for steps in view.timeline.values():
        for facts in steps:
            if facts.complete:
                usable[facts.step] = usable.get(facts.step, True) and facts.sampled
    return usable


def _span(steps: Mapping[int, bool]) -> str:
    return f"{min(steps)} to {max(steps)}" if steps else "none"


def _summaries(view: RunView, steps: Sequence[int]) -> dict[Key, Summary]:
    found: dict[Key, Summary] = {}
    for frame in view.scan(_COLUMNS, _KINDS, steps=steps):
        for record in records(frame):
            row = TensorRow.of(record)
            facts = view.step_facts(Process(row.rank, row.attempt), row.step)
            if row.phase == "recompute" or (facts is not None and facts.skipped and "grad" in row.kind):
                continue  # an overflow the scaler took care of says nothing about the next clean step
            summary = found.setdefault(row.key, Summary(row.dtype, row.shape, row.module_class))
            _add(summary, row, integer(record["unchanged"]))
    return found


def _add(summary: Summary, row: TensorRow, unchanged: int | None) -> None:
    summary.numel += row.numel
    summary.at_max += row.at_max
    summary.amax = max(summary.amax, row.amax or 0.0)
    if row.bad:
        summary.badness |= row.badness
        summary.first_bad_step = row.step if summary.first_bad_step is None else min(summary.first_bad_step, row.step)
    if row.kind == "update" and unchanged is not None:
        summary.unchanged += unchanged
        summary.intended += row.numel - row.zero + unchanged
    fmt = known_format(row.dtype)
    if fmt is not None and row.kind in ("output", "input", "grad_output", "weight_grad"):
        near = row.amin_nonzero is not None and row.amin_nonzero <= 4.0 * fmt.min_subnormal
        summary.flushed += flushed_tail(row.histogram, row.zero, fmt).total if near else 0.0
        summary.alive += row.numel - row.zero


def _different_model(found: Mapping[Key, Summary], expected: Mapping[Key, Summary]) -> str | None:
    common = found.keys() & expected.keys()
    every = found.keys() | expected.keys()
    if not every:
        return "no tensor was recorded on the common steps"
    if len(common) < SAME_MODEL * len(every):
        return f"different models: {len(common):,} of {len(every):,} tensors occur in both runs"
    weights = [k for k in common if k[2] == "weight"]
    equal = sum(found[k].shape == expected[k].shape for k in weights)
    if equal < SAME_MODEL * len(weights):
        return f"different models: {equal:,} of {len(weights):,} weights have the same shape in both runs"
    return None


def _losses(run: RunView, baseline: RunView, steps: Sequence[int]) -> Iterator[tuple[int, float, float]]:
    ours, theirs = _mean_losses(run), _mean_losses(baseline)
    for step in steps:
        if step in ours and step in theirs:
            yield step, ours[step], theirs[step]


def _mean_losses(view: RunView) -> dict[int, float]:
    """Per step the mean over ranks; NaN where any is non-finite. Skipped steps count: their loss is a loss."""
    by_step: dict[int, list[float]] = {}
    for steps in view.timeline.values():
        for facts in steps:
            if facts.loss_is_bad:
                by_step.setdefault(facts.step, []).append(math.nan)
            elif facts.loss is not None:
                by_step.setdefault(facts.step, []).append(facts.loss)
    return {step: fmean(values) for step, values in by_step.items()}
