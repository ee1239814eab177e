"""``precdoctor show``: summarise the content of a run."""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated, Any

import typer

from precdoctor.cli import options
from precdoctor.cli.common import Answer, opened, write_answer
from precdoctor.cli.values import choice, parse_count, read
from precdoctor.errors import UsageError

EXAMPLES = """\b
Examples:
  precdoctor show
  precdoctor show runs/a --top 20
  precdoctor show runs/a --dtypes
  precdoctor show runs/a --scans
  precdoctor show runs/a --output-format json"""


def show(
    run: options.NewestRun = None,
    top: Annotated[str, typer.Option(help="How many tensors per table.", metavar="N")] = "10",
    dtypes: Annotated[
        bool, typer.Option("--dtypes", help="Which op computed in which dtypes, in which module.")
    ] = False,
    scans: Annotated[bool, typer.Option("--scans", help="Which steps were scanned op by op, and why.")] = False,
    output_format: options.FullOrJson = "full",
    engine: options.Engine = None,
) -> int:
    """Show what is in a run.

    What was recorded and how, the tensors nearest to trouble, the timeline.
    """
    shape, count = read(choice("full", "json"), output_format, "--output-format"), read(parse_count, top, "--top")
    if dtypes and scans:
        raise UsageError("--dtypes cannot be combined with --scans")
    recorded = opened(run, engine)
    from precdoctor.diagnosis.analyses.op_dtypes import op_dtypes
    from precdoctor.diagnosis.analyses.scans import scans as scans_of
    from precdoctor.diagnosis.survey.view import RunView
    from precdoctor.reporting.show_view import print_dtypes, print_scans, print_summary
    from precdoctor.reporting.summary import summarise
    from precdoctor.runlog.atomic import jsonable

    content: Any
    document: Any
    print_content: Any
    if dtypes:
        content, print_content = op_dtypes(RunView(recorded)), print_dtypes
        document = {"ops": content}
    elif scans:
        content, print_content = scans_of(RunView(recorded)), print_scans
        document = {"scans": content}
    else:
        content, print_content = summarise(recorded, top=count), print_summary
        document = content
    show_content = partial(print_content, content)
    write_answer(sys.stdout, shape, Answer(lambda: {"schema_version": 1, **jsonable(document)}, show_content))
    return 0
