"""The modes of ``precdoctor whatif`` that replay a log: ``--loss-scaler``, ``--recipe`` and ``--accumulator``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

from precdoctor.cli.common import Answer
from precdoctor.errors import NothingRecordedError, UsageError

if TYPE_CHECKING:
    from precdoctor.diagnosis.offline.replay.fp8 import RecipeReplay
    from precdoctor.diagnosis.survey.view import RunView
    from precdoctor.runlog import Run

#: A half-open range of steps; None for an open end.
Span = tuple[int | None, int | None]


@dataclass(frozen=True)
class ReplayQuestion:
    """The flags of a replay; without the first three, no replay is asked for.

    Attributes:
        loss_scaler, recipe, accumulator: as on the command line; at most one is given.
        number_format: as on the command line; None for the default of the mode.
        kinds: kinds of tensors; None for those of the mode.
        module: a glob over FQNs; None for all modules.
        steps: the steps to replay.
    """

    loss_scaler: str | None
    recipe: str | None
    accumulator: str | None
    number_format: str | None
    kinds: tuple[str, ...] | None
    module: str | None
    steps: Span

    @property
    def mode(self) -> str | None:
        """The flag of the replay; None if no replay is asked for.

        Raises:
            UsageError: several replays, or a flag that the replay does not take.
        """
        modes = {"--loss-scaler": self.loss_scaler, "--recipe": self.recipe, "--accumulator": self.accumulator}
        given = [flag for flag, value in modes.items() if value is not None]
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)} are different questions; ask one at a time")
        if not given:
            return None
        rest = {
            "--format": self.number_format is not None,
            "--kind": self.kinds is not None,
            "--module": self.module is not None,
            "--steps": self.steps != (None, None),
        }
        accepted = {"--loss-scaler": {"--format"}, "--accumulator": {"--module"}}.get(given[0], set(rest))
        for flag, used in rest.items():
            if used and flag not in accepted:
                raise UsageError(f"{flag} does not go with {given[0]}: {_REASONS[given[0]]}")
        return given[0]

    def wants(self, module: str) -> bool:
        """Return whether ``module`` matches the glob."""
        return self.module is None or fnmatchcase(module, self.module)


_REASONS = {
    "--loss-scaler": "one loss scale holds for the whole model and the whole run; leave it out",
    "--accumulator": "lengths of sums follow from the shapes of weights and batches; leave it out",
}


def replay(run: Run, asked: ReplayQuestion, worst: int) -> Answer:
    """Replay the log.

    Raises:
        UsageError: invalid flags.
        RunUnreadableError: the log lacks the rows for this replay, or is damaged.
    """
    from precdoctor.diagnosis.engine import describe
    from precdoctor.diagnosis.survey.view import RunView

    mode = asked.mode
    assert mode is not None
    view = RunView(run)
    if view.steps.empty:
        raise NothingRecordedError(f"{run.origin} holds no training step; nothing can be replayed")
    answer = {"--loss-scaler": _loss_scaler, "--recipe": _recipe, "--accumulator": _accumulator}[mode]
    return answer(view, asked, worst, describe(view))


def _loss_scaler(view: RunView, asked: ReplayQuestion, _worst: int, facts: Mapping[str, Any]) -> Answer:
    from precdoctor.diagnosis.offline.replay.loss_scale import replay_loss_scale, used_policy
    from precdoctor.diagnosis.offline.replay.specs import parse_policy
    from precdoctor.numerics.names import find_element_format
    from precdoctor.reporting import replay_view, whatif_report

    assert asked.loss_scaler is not None
    spec = parse_policy(asked.loss_scaler)
    fmt = find_element_format(asked.number_format or "fp16")
    policy = None if spec == "best" else used_policy(view) if isinstance(spec, str) else spec
    answer = replay_loss_scale(view, policy, fmt=fmt)
    document = partial(whatif_report.loss_scale_document, answer, asked.loss_scaler, facts)
    return Answer(document, partial(replay_view.print_loss_scale, answer, facts))


def _recipe(view: RunView, asked: ReplayQuestion, worst: int, facts: Mapping[str, Any]) -> Answer:
    from precdoctor.diagnosis.offline.replay.blocks import replay_blocks
    from precdoctor.diagnosis.offline.replay.fp8 import CANDIDATES, KINDS, best_delayed, replay_recipes
    from precdoctor.diagnosis.offline.replay.specs import parse_operand_format, parse_recipe
    from precdoctor.numerics.blocks import BlockFormat
    from precdoctor.reporting import replay_view, whatif_report

    assert asked.recipe is not None
    recipe = parse_recipe(asked.recipe)
    kinds = asked.kinds or KINDS
    replays: tuple[RecipeReplay, ...]
    if isinstance(recipe, BlockFormat):
        if asked.number_format is not None:
            raise UsageError(f"--format does not go with --recipe {asked.recipe}: {recipe.name} names its elements")
        replays = (replay_blocks(view, recipe, kinds=kinds, wanted=asked.wants, steps=asked.steps),)
    else:
        tried = CANDIDATES if isinstance(recipe, str) else (recipe,)
        format_of = parse_operand_format(asked.number_format or "hybrid")
        replays = replay_recipes(
            view, tried, format_of=format_of, kinds=kinds, wanted=asked.wants, steps=asked.steps
        )  # fmt: skip
    best = best_delayed(replays) if recipe == "best" else None
    document = partial(whatif_report.recipe_document, replays, best, asked.recipe, facts)
    return Answer(document, partial(replay_view.print_recipe, replays, best, facts, worst=worst))


def _accumulator(view: RunView, asked: ReplayQuestion, worst: int, facts: Mapping[str, Any]) -> Answer:
    from precdoctor.diagnosis.offline.replay.accumulator import replay_accumulator
    from precdoctor.diagnosis.offline.replay.specs import parse_accumulator
    from precdoctor.reporting import replay_view, whatif_report

    assert asked.accumulator is not None
    answer = replay_accumulator(view, parse_accumulator(asked.accumulator), wanted=asked.wants)
    document = partial(whatif_report.accumulator_document, answer, asked.accumulator, facts)
    return Answer(document, partial(replay_view.print_accumulator, answer, facts, worst=worst))
