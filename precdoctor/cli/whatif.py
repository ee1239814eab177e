"""``precdoctor whatif``: predict a run's tensors in another number format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from precdoctor.cli import options
from precdoctor.cli.common import Answer, chosen_kinds, destination, opened, write_answer
from precdoctor.cli.values import choice, parse_count, parse_decibels, parse_scale, parse_share, parse_steps, read
from precdoctor.cli.whatif_replay import ReplayQuestion, Span, replay
from precdoctor.errors import UsageError

if TYPE_CHECKING:
    from precdoctor.diagnosis.offline.whatif.forecast import Question
    from precdoctor.diagnosis.offline.whatif.recipe import Recipe
    from precdoctor.diagnosis.offline.whatif.target import Target
    from precdoctor.runlog import Run

EXAMPLES = """\b
Examples:
  precdoctor whatif --format e4m3
  precdoctor whatif runs/a --format mxfp8 --module 'blocks.*.mlp*'
  precdoctor whatif runs/a --format fp16 --loss-scale 2^13 --kind grad_output
  precdoctor whatif runs/a --format e5m2 --output-format json
  precdoctor whatif runs/a --format int8 --scaling token
  precdoctor whatif runs/a --state e4m3
  precdoctor whatif runs/a --plan -o plan.toml
  precdoctor whatif runs/a --loss-scaler best
  precdoctor whatif runs/a --recipe delayed:16:max --format hybrid
  precdoctor whatif runs/a --accumulator 14:128"""

_SHAPES = ("full", "concise", "json", "markdown")


def whatif(
    run: options.NewestRun = None,
    number_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="e5m2, mxfp8, nvfp4, fp16 ...; default: e4m3, with --recipe hybrid, with --loss-scaler fp16.",
            metavar="NAME",
        ),
    ] = None,
    scaling: Annotated[
        str | None,
        typer.Option(
            help="What shares a scale: tensor, tile128, block32, block16, token, channel, head, group128, or none; "
            "default: what the format implies.",
            metavar="HOW",
        ),
    ] = None,
    scale: Annotated[
        str | None, typer.Option(help="One multiplier for all tensors instead, such as 64 or 2^6.", metavar="X")
    ] = None,
    scale_rule: Annotated[
        str | None, typer.Option(help="Block scales: floor, up or amax; default: the format's.", metavar="RULE")
    ] = None,
    loss_scale: Annotated[
        str | None, typer.Option(help="Gradients as if the loss scale had been this.", metavar="X")
    ] = None,
    kind: options.Kinds = None,
    module: Annotated[str | None, typer.Option(help="Modules whose name matches.", metavar="GLOB")] = None,
    steps: Annotated[str | None, typer.Option(help="Steps A to B, B left out.", metavar="A:B")] = None,
    worst: Annotated[str, typer.Option(help="How many tensors to list.", metavar="N")] = "10",
    max_flushed: Annotated[
        str, typer.Option(help="Target: share of elements that may become zero.", metavar="SHARE")
    ] = "0.5%",
    max_saturated: Annotated[
        str, typer.Option(help="Target: share of elements that may be clipped or overflow.", metavar="SHARE")
    ] = "0",
    min_sqnr: Annotated[str, typer.Option(help="Target: least signal to quantisation noise, dB.", metavar="DB")] = "20",
    loss_scaler: Annotated[
        str | None,
        typer.Option(help="Replay with a loss scaler: init=65536,interval=2000 ..., used or best.", metavar="SCALER"),
    ] = None,
    fp8_recipe: Annotated[
        str | None,
        typer.Option("--recipe", help="Replay FP8 scaling: current, delayed:16:max, mxfp8 or best.", metavar="RECIPE"),
    ] = None,
    accumulator: Annotated[
        str | None, typer.Option(help="Error of sums in a narrow accumulator.", metavar="BITS[:PROMOTE]")
    ] = None,
    state: Annotated[
        str | None, typer.Option(help="Would the optimizer's states survive in e4m3, bf16, fp16 ...?", metavar="NAME")
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Per module the narrowest precision that holds, instead of one format.")
    ] = False,
    horizon: Annotated[
        str | None,
        typer.Option(help="Plan: extrapolate amax to this step; default: as far again as recorded.", metavar="STEP"),
    ] = None,
    output_format: Annotated[
        str | None,
        typer.Option(help="full, concise, json or markdown; of a plan full, json or toml.", metavar="FORMAT"),
    ] = None,
    output: options.OutputFile = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the output file if there is one.")] = False,
) -> int:
    """Predict what tensors would become in another number format.

    Underflow, saturation and error per tensor at its worst recorded step, from the log alone; the tensors that miss
    the target, and the cheapest format and scaling that would hold for them.
    """
    shape = _shape(output_format, output, plan=plan)
    goal, count = read(parse_count, horizon, "--horizon"), read(parse_count, worst, "--worst")
    span = read(parse_steps, steps, "--steps") or (None, None)
    limits = (
        read(parse_share, max_flushed, "--max-flushed"),
        read(parse_share, max_saturated, "--max-saturated"),
        read(parse_decibels, min_sqnr, "--min-sqnr"),
    )
    scales = read(parse_scale, scale, "--scale"), read(parse_scale, loss_scale, "--loss-scale")
    rule = read(choice("floor", "up", "amax"), scale_rule, "--scale-rule")
    kinds = chosen_kinds(kind) or None
    replayed = ReplayQuestion(loss_scaler, fp8_recipe, accumulator, number_format, kinds, module, span)
    answer = partial(_answer, run, output, shape, force=force)
    mode = replayed.mode or (None if state is None else "--state")
    if mode is not None and shape not in ("full", "json"):
        raise UsageError(f"--output-format {shape} does not go with {mode}; take full or json")
    if replayed.mode is not None:
        given = {"--scaling": scaling, "--scale": scale, "--scale-rule": scale_rule, "--loss-scale": loss_scale}
        _refuse({**given, "--plan": plan, "--horizon": horizon}, f"{replayed.mode} is a question of its own")
        return answer(partial(replay, asked=replayed, worst=count))
    from precdoctor.diagnosis.offline.whatif.forecast import Question
    from precdoctor.diagnosis.offline.whatif.recipe import SCALINGS, ask
    from precdoctor.diagnosis.offline.whatif.target import Target

    scaling = read(choice(*SCALINGS), scaling, "--scaling")
    target = Target(*limits)
    if state is not None:
        given = {"--format": number_format, "--loss-scale": loss_scale, "--horizon": horizon}
        _refuse({"--kind": kind, "--plan": plan, **given}, "--state NAME asks about the states of the optimizer alone")
        recipe = ask(state, scaling=scaling, scale=scales[0], rule=rule)
        return answer(partial(_states, recipe=recipe, module=module, steps=span, worst=count))
    if plan:
        given = {"--format": number_format, "--scaling": scaling, "--scale": scale, "--scale-rule": scale_rule}
        _refuse({**given, "--loss-scale": loss_scale, "--kind": kind}, "a plan chooses formats and scalings itself")
        return answer(partial(_plan, target=target, module=module, steps=span, horizon=goal))
    _refuse({"--horizon": horizon}, "only a plan extrapolates; add --plan")
    recipe = ask(number_format or "e4m3", scaling=scaling, scale=scales[0], loss_scale=scales[1], rule=rule)
    asked = Question(recipe, target, kinds, module, span)
    return answer(partial(_forecast, asked=asked, worst=count))


def _answer(
    run: Path | None, output: Path | None, shape: str, answer_of: Callable[[Run], Answer], *, force: bool
) -> int:
    """Open the run, then the output, and write what ``answer_of`` returns of the run; return 0."""
    recorded = opened(run)
    with destination(output, force=force) as stream:
        write_answer(stream, shape, answer_of(recorded))
    return 0


def _forecast(run: Run, asked: Question, worst: int) -> Answer:
    from precdoctor.diagnosis.engine import describe, view_of
    from precdoctor.diagnosis.offline.whatif.forecast import forecast
    from precdoctor.reporting import whatif_report, whatif_view

    answer = forecast(run, asked)
    facts = describe(view_of(run))
    return Answer(
        partial(whatif_report.document, answer, facts),
        partial(whatif_view.print_full, answer, facts, worst=worst),
        concise=partial(whatif_view.print_concise, answer),
        text=partial(whatif_view.markdown, answer, facts, worst=worst),
    )


def _states(run: Run, recipe: Recipe, module: str | None, steps: Span, worst: int) -> Answer:
    from precdoctor.diagnosis.engine import describe, view_of
    from precdoctor.diagnosis.offline.whatif.states import forecast_states
    from precdoctor.reporting import states_view

    answer = forecast_states(run, recipe, module=module, steps=steps)
    facts = describe(view_of(run))
    show = partial(states_view.print_states, answer, facts, worst=worst)
    return Answer(partial(states_view.document, answer, facts), show)


def _plan(run: Run, target: Target, module: str | None, steps: Span, horizon: int | None) -> Answer:
    from precdoctor.diagnosis.engine import describe, view_of
    from precdoctor.diagnosis.offline.whatif.plan import finite_steps
    from precdoctor.reporting import plan_view

    view = view_of(run)
    steps, remark = finite_steps(view, steps)
    facts = describe(view)
    if view.trains:
        from precdoctor.diagnosis.offline.whatif.plan import make_plan

        plan = make_plan(run, target, module=module, steps=steps, horizon=horizon)
        document = plan_view.document(plan, facts, remark)
        show = partial(plan_view.print_plan, plan, facts, remark=remark)
    else:
        from precdoctor.diagnosis.offline.whatif.inference_plan import make_inference_plan

        _refuse({"--horizon": horizon is not None}, "nothing trains in this run, so no amax has a trend")
        inference_plan = make_inference_plan(run, target, module=module, steps=steps)
        document = plan_view.inference_document(inference_plan, facts, remark)
        show = partial(plan_view.print_inference_plan, inference_plan, facts, remark=remark)
    return Answer(lambda: document, show, text=partial(plan_view.toml, document))


def _shape(asked: str | None, output: Path | None, *, plan: bool) -> str:
    """The output format; for a plan to a file without ``--output-format``: JSON for ``.json``, else TOML."""
    if asked is not None:
        return str(read(choice(*(("full", "json", "toml") if plan else _SHAPES)), asked, "--output-format"))
    if plan and output is not None:
        return "json" if output.suffix == ".json" else "toml"
    return "full"


def _refuse(flags: Mapping[str, Any], why: str) -> None:
    """Raise a UsageError if one of these flags, which would have no effect, has a value; ``why`` is the reason."""
    for flag, value in flags.items():
        if value:
            raise UsageError(f"{flag} has nothing to act on: {why}")
