"""``precdoctor compare``: two runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from precdoctor.cli import options
from precdoctor.cli.common import deliver, opened, rule_options, settings_in_force
from precdoctor.errors import UsageError

if TYPE_CHECKING:
    from precdoctor.comparison.op_compare import OpComparison

EXAMPLES = """\b
Examples:
  precdoctor compare runs/main runs/pull-request
  precdoctor compare runs/before runs/after --output-format markdown
  precdoctor compare runs/old runs/new --rename model.blocks=transformer.h
  precdoctor compare runs/eager runs/compiled --ops --html ops.html"""


def compare(
    a: Annotated[Path, typer.Argument(help="The run to compare with.", metavar="A")],
    b: Annotated[Path, typer.Argument(help="The run to judge.", metavar="B")],
    rename: Annotated[
        list[str] | None,
        typer.Option(help="Modules named OLD... in A are NEW... in B; may be repeated.", metavar="OLD=NEW"),
    ] = None,
    ops: Annotated[
        bool, typer.Option("--ops", help="Compare op by op, on the steps that both runs recorded with --ops.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="With --ops: also write one HTML page to this file.", metavar="FILE")
    ] = None,
    output_format: options.OutputFormat = None,
    output: options.OutputFile = None,
    also: options.Also = None,
    force: options.ReplaceFiles = False,
    fail_on: options.ExitOn = None,
    engine: options.Engine = None,
) -> int:
    """Report where two runs part, what moved, and what got worse.

    Bits first: the first tensor in execution order that differs. Then how far the exponents of every tensor moved, the
    gap of the losses, and the regressions that gate checks. With --ops instead: the first op whose result differs
    beyond what its format explains, and what follows from it. Exits with 0 unless --fail-on is given, and with 3 when
    the runs have nothing in common.
    """
    if ops and rename:
        raise UsageError("--rename cannot be combined with --ops: ops are matched by the names that modules have")
    if html is not None and not ops:
        raise UsageError("--html is for --ops; add it, or write a page with: precdoctor report RUN --against OTHER")
    from precdoctor.comparison.compare import compare as judge
    from precdoctor.comparison.op_compare import compare_ops
    from precdoctor.diagnosis.ranking.verdict import exit_code
    from precdoctor.reporting.outputs import Report

    settings = settings_in_force()
    level = settings.get("compare", "fail-on", fail_on)
    shape = settings.get("compare", "output-format", output_format) or "full"
    runs = opened(a, engine), opened(b, engine)
    if ops:
        by_op = compare_ops(*runs)
        if html is not None:
            _write_page(by_op, html, force=force)
        report = Report(by_op.diagnosis, exit_code(by_op.diagnosis, level), level, ops=by_op)
    else:
        regressions = rule_options(settings, of_regressions=True)
        comparison = judge(*runs, renames=[_renaming(text) for text in rename or ()], options=regressions)
        report = Report(comparison.diagnosis, exit_code(comparison.diagnosis, level), level, comparison=comparison)
    deliver(report, shape, output, settings.get("compare", "also", also) or (), force=force)
    return report.exit_code


def _write_page(found: OpComparison, file: Path, *, force: bool) -> None:
    from precdoctor.cli.report import write
    from precdoctor.reporting.html.op_page import render

    write(render(found), file, force=force)


def _renaming(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not equals:
        raise UsageError(f"--rename takes OLD=NEW, such as model.blocks=transformer.h, got {text!r}")
    return old, new
