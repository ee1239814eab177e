"""Export to Weights & Biases, offline only: the files stay on this disk until the user runs ``wandb sync``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from precdoctor.errors import UsageError
from precdoctor.integrations.export.points import Choice, Point, points
from precdoctor.runlog import Run


def to_wandb(run: Run, folder: Path, choice: Choice) -> list[Path]:
    """Write one offline W&B run per process below ``folder``; return their directories.

    Raises:
        UsageError: the package wandb is not installed.
        RunUnreadableError: a part of the log is damaged.
        OSError: the folder cannot be written.
    """
    try:
        import wandb
    except ImportError as error:
        raise UsageError(
            f"exporting to Weights & Biases needs a package that cannot be imported ({error}); type: pip install wandb"
        ) from None
    name = run.path.resolve().name
    places = []
    for process, steps in points(run, choice):
        settings = wandb.Settings(
            mode="offline", console="off", silent=True, save_code=False, disable_git=True, x_disable_stats=True
        )
        with wandb.init(
            project="precdoctor", name=f"{name}-{process}", group=name, dir=str(folder), settings=settings
        ) as target:
            places.append(Path(target.dir).parent)
            for point in steps:
                target.log(_values(wandb, point), step=point.step)
    return places


def _values(wandb: Any, point: Point) -> dict[str, Any]:
    values: dict[str, Any] = dict(point.scalars)
    for tag, (lo, counts) in point.histograms.items():
        values[tag] = wandb.Histogram(np_histogram=(counts, [lo + i for i in range(len(counts) + 1)]))
    return values
