"""``precdoctor gate``: a verdict for continuous integration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from precdoctor.cli import options
from precdoctor.cli.common import deliver, destination, opened, say, settings_in_force
from precdoctor.cli.config import Settings
from precdoctor.errors import UsageError

if TYPE_CHECKING:
    from precdoctor.comparison.baseline import Baseline
    from precdoctor.comparison.gate import GateReport
    from precdoctor.runlog import Run

EXAMPLES = """\b
Examples:
  precdoctor gate runs/pull-request
  precdoctor gate runs/main-1 runs/main-2 --write-baseline good.toml
  precdoctor gate runs/pull-request --baseline good.toml --also junit=gate.xml
  precdoctor gate runs/a --fail-if 'flushed:*:2%' --fail-if 'headroom:*:4'"""


def gate(
    runs: Annotated[list[Path], typer.Argument(help="Run directories to judge.", metavar="RUN...")],
    baseline: Annotated[
        list[Path] | None,
        typer.Option(
            help="What to compare with: a file of --write-baseline, or a healthy run (may be repeated).",
            metavar="FILE|RUN",
        ),
    ] = None,
    write_baseline: Annotated[
        Path | None,
        typer.Option(help="Learn from these runs, healthy repeats, and write FILE if they pass.", metavar="FILE"),
    ] = None,
    aggregate: Annotated[
        str | None,
        typer.Option(
            help="Several runs are repeats: each check is decided by the median, best or worst one; default: worst.",
            metavar="HOW",
        ),
    ] = None,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-if",
            help="A limit of your own, such as flushed:blocks.*:2%; may be repeated.",
            metavar="METRIC:MODULES:LIMIT",
        ),
    ] = None,
    allow: Annotated[
        Path | None, typer.Option(help="TOML file of findings accepted for now, with reasons.", metavar="FILE")
    ] = None,
    output_format: options.OutputFormat = None,
    output: options.OutputFile = None,
    also: options.Also = None,
    force: options.ReplaceFiles = False,
    select: options.Select = None,
    ignore: options.Ignore = None,
    fail_on: Annotated[
        str | None, typer.Option(help="Fail at this level or above (error, warning); default: error.", metavar="LEVEL")
    ] = None,
    engine: options.Engine = None,
) -> int:
    """Judge runs for CI, with an exit status.

    0 passed, 1 failed, 2 used wrongly, 3 no trustworthy verdict. The rules of diagnose as pass or fail and, with
    --baseline, what got worse since then: expected, found and limit.
    """
    from precdoctor.reporting.outputs import Report

    settings = settings_in_force(whole=True)
    recorded = [opened(run, engine) for run in runs]
    # --write-baseline asks whether the runs are healthy, so they are not compared with an older baseline
    bases = () if write_baseline is not None else settings.get("gate", "baseline", baseline) or ()
    shape = settings.get("gate", "output-format", output_format) or "full"
    flags = {"select": select, "ignore": ignore, "fail-on": fail_on, "aggregate": aggregate}
    report = _gate_report(recorded, bases, settings, flags, settings.get("gate", "fail-if", fail_if) or (), allow)
    if write_baseline is not None and report.exit_code == 0:
        _write(recorded, write_baseline, force=force)
        return 0
    if write_baseline is not None:
        say(f"{write_baseline} is not written: only runs that pass the gate can be a baseline")
    whole = Report(report.diagnosis, report.exit_code, report.fail_on, report)
    deliver(whole, shape, output, settings.get("gate", "also", also) or (), force=force)
    return report.exit_code


def _gate_report(
    runs: Sequence[Run],
    bases: Sequence[Path],
    settings: Settings,
    flags: dict[str, Any],
    limits: Iterable[str],
    allow: Path | None,
) -> GateReport:
    from precdoctor.comparison.allowances import read_allowances
    from precdoctor.comparison.fail_if import parse_limit
    from precdoctor.comparison.gate import gate as judge

    allowed = settings.get("gate", "allow", allow)
    return judge(
        runs,
        baseline=_baseline(bases, runs[0].engine),
        options=settings.rules,
        limits=[parse_limit(text) for text in limits],
        allowances=read_allowances(allowed) if allowed is not None else (),
        **{"fail_on": "error", **settings.chosen("gate", flags)},
    )


def _baseline(bases: Sequence[Path], engine: str | None) -> Baseline | list[Run] | None:
    """The baseline of a file, or the runs to learn it from; None without ``bases``.

    A missing file, or one among several paths, is a UsageError.
    """
    from precdoctor.comparison.baseline_file import read_baseline

    files = [base for base in bases if base.is_file()]
    if files and len(bases) > 1:
        raise UsageError(f"--baseline takes one file, or runs; got the file {files[0]} and {len(bases) - 1} more")
    if files:
        return read_baseline(files[0])
    for base in bases:
        if base.suffix == ".toml" and not base.exists():
            raise UsageError(
                f"there is no baseline {base}; write one from healthy runs with: precdoctor gate RUN... "
                f"--write-baseline {base}"
            )
    return [opened(base, engine) for base in bases] or None


def _write(runs: Sequence[Run], file: Path, *, force: bool) -> None:
    from precdoctor.comparison.baseline import learn_from
    from precdoctor.comparison.baseline_file import text_of
    from precdoctor.diagnosis.claims.words import plural

    baseline = learn_from(runs)
    text = text_of(baseline)
    with destination(file, force=force) as stream:
        stream.write(text)
    counted = ((baseline.tensors, "tensor"), (baseline.sampled, "sampled step"), (runs, "run"))
    say(", ".join(plural(len(what), name) for what, name in counted))
    if len(runs) == 1:
        say("one run has no spread: limits come from rounding alone and are wide; give three runs or more")
