"""``precdoctor export``: write a run for other tools."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from precdoctor.cli import options
from precdoctor.cli.common import chosen_kinds, opened, say
from precdoctor.cli.values import choice, read
from precdoctor.errors import RunExistsError, UsageError

_TARGETS = ("tensorboard", "wandb", "csv", "parquet")

EXAMPLES = """\b
Examples:
  precdoctor export --to tensorboard
  precdoctor export runs/a --to csv -o tables
  precdoctor export runs/a --to parquet --kind grad_output --module 'blocks.*'"""


def export(
    run: options.NewestRun = None,
    to: Annotated[str, typer.Option("--to", help="tensorboard, wandb (offline), csv or parquet.", metavar="TOOL")] = "",
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="Directory to write; default: the run's name and the tool's.", metavar="DIR"
        ),
    ] = None,
    kind: options.Kinds = None,
    module: Annotated[
        list[str] | None, typer.Option(help="Only modules whose name is like this; may be repeated.", metavar="GLOB")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write into a directory that holds something.")] = False,
) -> int:
    """Write a run for other tools.

    TensorBoard and Weights & Biases get curves of every step and tensor and histograms of exponents; CSV and Parquet
    get the tables as they are. Nothing is sent anywhere.
    """
    if not to:
        raise UsageError(f"name the tool with --to: {', '.join(_TARGETS)}")
    target = read(choice(*_TARGETS), to, "--to")
    from precdoctor.integrations.export.points import Choice

    kinds = chosen_kinds(kind)
    recorded = opened(run)
    folder = Path(f"{recorded.path.resolve().name}-{target}") if output is None else output
    _make_folder(folder, force=force)
    try:
        files = _exporter(target)(recorded, folder, Choice(kinds, tuple(module or ())))
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror or error}; name another with -o DIR") from None
    finally:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    if not files:
        raise UsageError(f"{recorded.path} holds nothing to export yet")
    say(f"Wrote {folder}{_hint(target, folder, files)}")
    return 0


def _make_folder(folder: Path, *, force: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a directory with -o DIR")
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise RunExistsError(
            f"{folder} holds something already; name another directory with -o, or --force to write there"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be made: {error.strerror}") from None


def _exporter(target: str) -> Callable[..., list[Path]]:
    """The export function of a target, imported on use, because two of them need optional packages."""
    from importlib import import_module

    home = {"csv": "tables", "parquet": "tables"}.get(target, target)
    return getattr(import_module(f"precdoctor.integrations.export.{home}"), f"to_{target}")


def _hint(target: str, folder: Path, files: list[Path]) -> str:
    """The end of the final message: the command that shows the export, or the names of its files."""
    if target == "tensorboard":
        return f"; next, type: tensorboard --logdir {folder}"
    if target == "wandb":
        return f"; to upload it, type: wandb sync {' '.join(map(str, files))}"
    return f": {', '.join(file.name for file in files)}"
