"""Pairs the tensors of a run with those of a baseline on the same steps, or states why that is impossible."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from precdoctor.comparison.baseline import Baseline, Expected, learn
from precdoctor.comparison.paired_rows import Module, names_by_rules, names_by_structure, translated
from precdoctor.comparison.steps import (
    UNSAMPLED,
    bad_losses,
    loss_window,
    mean_losses,
    sampled_by_all,
    skipped_share,
    span,
    step_mismatch,
    typical_loss,
    usable_steps,
)
from precdoctor.comparison.summary import Summary, summaries
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.survey.rows import Key
from precdoctor.diagnosis.survey.view import RunView

#: Two runs are of different models if a smaller share of their tensors, or of the shapes of their weights, agrees.
SAME_MODEL = 0.5


@dataclass(frozen=True)
class Pairing:
    """A run paired with its baseline.

    Attributes:
        steps: all compared steps, sampled or not.
        sampled: the steps whose tensors are compared.
        found: the run's tensors, by their names in the baseline: summaries over the sampled steps.
        baseline: the expected values.
        loss: median loss of the run over the last quarter of the steps; None if no loss is finite.
        skipped: share of the steps that the run's loss scaler skipped.
        bad_losses: steps whose loss is non-finite in the run but not in the baseline.
        losses: ``(step, found, expected)`` if two runs are compared (:func:`pair`); empty for any other baseline.
        names: renamed modules, ``module in the run -> module in the baseline``.
    """

    steps: Sequence[int]
    sampled: Sequence[int]
    found: Mapping[Key, Summary]
    baseline: Baseline
    loss: float | None = None
    skipped: float = 0.0
    bad_losses: Sequence[int] = ()
    losses: Sequence[tuple[int, float, float]] = ()
    names: Mapping[Module, Module] = field(default_factory=dict)

    @property
    def expected(self) -> Mapping[Key, Expected]:
        """The baseline's tensors."""
        return self.baseline.tensors

    @property
    def common(self) -> Iterator[tuple[Key, Summary, Expected]]:
        """The tensors that both have, as ``(key, found, expected)``."""
        return ((k, s, self.expected[k]) for k, s in self.found.items() if k in self.expected)

    @property
    def scope(self) -> str:
        """What is compared, in words: ``412 tensors on 25 common steps``."""
        return f"{plural(len(self.found), 'tensor')} on {plural(len(self.sampled), 'common step')}"


def subject(key: Key) -> str:
    """The name of a tensor in lines and findings: ``GPT#0 blocks.3.attn output``."""
    root, module, kind, name, call = key
    words = [root, module, kind, name, f"call {call}" if call else ""]
    return " ".join(w for w in words if w)


def pair(run: RunView, baseline: RunView, renames: Sequence[tuple[str, str]] = ()) -> Pairing | str:
    """Pair two runs on their common steps; returns a sentence if they cannot be compared.

    ``renames`` are ``(prefix in the run, prefix in the baseline)`` of module names; other renamed modules are matched
    by class, shapes and order.
    """
    ours, theirs = usable_steps(run), usable_steps(baseline)
    steps = sorted(ours.keys() & theirs.keys())
    if not steps:
        return step_mismatch(ours, theirs) or f"neither has a complete step: {span(ours)}"
    sampled = sampled_by_all([ours, theirs])
    if not sampled:
        return UNSAMPLED
    return pair_with_baseline(run, learn([baseline], steps, sampled, baseline.run.origin), renames, against=baseline)


def pair_with_baseline(
    run: RunView, baseline: Baseline, renames: Sequence[tuple[str, str]] = (), *, against: RunView | None = None
) -> Pairing | str:
    """Pair a run with a baseline, on the baseline's steps; returns a sentence if they cannot be compared.

    ``renames`` as in :func:`pair`; ``against`` is the run from which the baseline was learned, for the losses of single
    steps.
    """
    usable = usable_steps(run)
    lacking = [step for step in baseline.sampled if not usable.get(step)]
    if lacking:
        every = baseline.provenance.get("every")
        how = f" with --every {every}" if every else " with the same --every (a smoke run: --every 1)"
        return f"step {lacking[0]} was not sampled in the run, and in the baseline it was; record it{how}"
    found = summaries(run, baseline.sampled)
    names = names_by_rules(found, renames)
    names |= names_by_structure(translated(found, names), baseline.tensors)
    found = translated(found, names)
    if (different := _different_model(found, baseline.tensors)) is not None:
        return different
    steps = baseline.steps
    theirs = mean_losses(against) if against is not None else {}
    return Pairing(
        steps=steps,
        sampled=baseline.sampled,
        found=found,
        baseline=baseline,
        loss=typical_loss(run, loss_window(steps)),
        skipped=skipped_share(run, steps),
        bad_losses=[s for s in bad_losses(run, steps) if s not in baseline.bad_losses],
        losses=[(s, v, theirs[s]) for s, v in sorted(mean_losses(run).items()) if s in steps and s in theirs],
        names=names,
    )


def _different_model(found: Mapping[Key, Summary], expected: Mapping[Key, Expected]) -> str | None:
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
