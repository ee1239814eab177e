"""Where reports go: one format to stdout or a file, and any number of others to files of their own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from precdoctor.cli.common import destination
from precdoctor.cli.values import OUTPUT_FORMATS
from precdoctor.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from precdoctor.reporting.outputs import Report


def deliver(report: Report, shape: str, output: Path | None, also: Iterable[str], *, force: bool) -> None:
    """Write the report in every format asked for.

    Raises:
        UsageError: ``also`` is not FORMAT=FILE, the same file twice, or a file that cannot be written.
        RunExistsError: a file is there and ``force`` is not given.
    """
    from precdoctor.reporting.outputs import WRITERS

    wanted = [(shape, output), *(_parsed(entry) for entry in also)]
    files = [file for _, file in wanted if file is not None]
    twice = next((file for file in files if files.count(file) > 1), None)
    if twice is not None:
        raise UsageError(f"two reports would be written to {twice}; give each its own file")
    # stdout last: whoever reads it may stop reading (`| head`), and that ends us
    for name, file in sorted(wanted, key=lambda w: w[1] is None):
        with destination(file, force=force) as stream:
            WRITERS[name](report, stream)


def _parsed(entry: str) -> tuple[str, Path]:
    shape, equals, file = entry.partition("=")
    if not equals or not file:
        raise UsageError(f"--also takes FORMAT=FILE, such as junit=precdoctor.xml, got {entry!r}")
    if shape not in OUTPUT_FORMATS:
        raise UsageError(f"--also: {shape!r} is not a format{did_you_mean(shape, OUTPUT_FORMATS)}")
    return shape, Path(file).expanduser()
