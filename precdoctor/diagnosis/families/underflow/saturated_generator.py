"""Two optimizers whose models play against each other, and one that gets nothing back any more from the other's model.

The first of them learns through the second's model, whose weights it does not move: a generator through its
discriminator. With a loss that saturates, such as log(1 - D(G(z))), the gradient that comes through is the smaller the
surer the second is. Its loss goes *up* meanwhile: where gradients vanish because all is learnt, losses go down.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from precdoctor.diagnosis.survey.healthy_steps import is_well
from precdoctor.diagnosis.survey.histories import by_optimizer, watched_steps
from precdoctor.diagnosis.survey.rows import text
from precdoctor.diagnosis.survey.step_facts import StepFacts
from precdoctor.diagnosis.survey.view import Process, RunView

#: Steps of an optimizer that are enough to compare the oldest quarter with the newest.
_FEWEST = 24


@dataclass(frozen=True)
class Player:
    """An optimizer whose gradients come through the other one's model; medians over a quarter of its steps.

    Attributes:
        root, through: the model it trains, and the one its gradients come through.
        norms, losses: over the oldest quarter and over the newest.
        steps: of this optimizer.
    """

    process: Process
    root: str
    through: str
    norms: tuple[float, float]
    losses: tuple[float, float]
    #: Every loss of the newest quarter is above the median of the oldest.
    rose: bool
    steps: Sequence[StepFacts]

    @property
    def fallen(self) -> float:
        """How many times smaller the gradient is than it was."""
        return self.norms[0] / self.norms[1]


def players(view: RunView) -> list[Player]:
    """Those that have taken steps enough and still get a gradient; the one whose gradient fell most first."""
    if len({o for _, o in by_optimizer(view)}) < 2:
        return []
    trained = _roots_by_optimizer(view, "weight_grad_step")
    passed = _roots_by_optimizer(view, "grad_output")
    found = []
    for (process, optimizer), steps in by_optimizer(view).items():
        own = trained.get(optimizer, set())
        rivals = {r for other, roots in trained.items() if other != optimizer for r in roots} - own
        through = sorted(passed.get(optimizer, set()) & rivals)
        if len(own) != 1 or not through:
            continue
        known = list(_finite(view, process, steps))
        if len(known) >= _FEWEST:
            old, new = known[: len(known) // 4], known[-(len(known) // 4) :]
            norms = median(n for _, n in old), median(n for _, n in new)
            losses = median(x for x, _ in old), median(x for x, _ in new)
            if norms[1] > 0.0:
                rose = min(x for x, _ in new) > losses[0]
                found.append(Player(process, next(iter(own)), through[0], norms, losses, rose, steps))
    return sorted(found, key=lambda s: -s.fallen)


def _finite(view: RunView, process: Process, steps: Sequence[StepFacts]) -> Iterator[tuple[float, float]]:
    """Loss and gradient norm of the healthy steps."""
    for s in steps:
        if s.loss is not None and s.grad_norm is not None and not s.skipped and is_well(view, process, s):
            yield s.loss, s.grad_norm


def _roots_by_optimizer(view: RunView, kind: str) -> Mapping[str, set[str]]:
    """In whose steps rows of this kind are recorded of which roots."""
    whose = {(p, s.step): s.optimizer for p, steps in view.timeline.items() for s in steps}
    found: dict[str, set[str]] = {}
    for frame in view.scan(("root", "kind"), (kind,), steps=watched_steps(view)):
        places = frame[["rank", "attempt", "step", "root"]].drop_duplicates()
        for rank, attempt, step, root in places.itertuples(index=False):
            optimizer = whose.get((Process(int(rank), int(attempt)), int(step)), "")
            found.setdefault(optimizer, set()).add(text(root))
    return found
