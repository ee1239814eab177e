"""Export to TensorBoard event files, one run per process; needs the package tensorboard, not torch or TensorFlow."""

from __future__ import annotations

from pathlib import Path

from precdoctor.errors import UsageError
from precdoctor.integrations.export.points import Choice, Point, points
from precdoctor.runlog import Run

#: Suffix of our files: a later export may replace files with it.
SUFFIX = ".precdoctor"


def to_tensorboard(run: Run, folder: Path, choice: Choice) -> list[Path]:
    """Write event files below ``folder``, one directory per process; return the files.

    Histograms are of binary exponents: their axis is log2 of the magnitude.

    Raises:
        UsageError: the package tensorboard is not installed.
        RunUnreadableError: a part of the log is damaged.
        OSError: the folder cannot be written.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise UsageError(
            f"exporting to TensorBoard needs a package that cannot be imported ({error}); type: pip install tensorboard"
        ) from None
    files = []
    for process, steps in points(run, choice):
        place = folder / process
        for old in place.glob(f"events.out.tfevents.*{SUFFIX}"):
            old.unlink()
        writer = EventFileWriter(str(place), filename_suffix=SUFFIX)
        try:
            for point in steps:
                writer.add_event(Event(step=point.step, wall_time=point.wall_time, summary=_summary(point)))
        finally:
            writer.close()
        files += sorted(place.glob(f"events.out.tfevents.*{SUFFIX}"))
    return files


def _summary(point: Point) -> object:
    from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

    summary = Summary()
    for tag, value in point.scalars.items():
        summary.value.add(tag=tag, simple_value=value)
    for tag, (lo, counts) in point.histograms.items():
        ends = [float(lo + i + 1) for i in range(len(counts))]
        middle = [(end - 0.5, count) for end, count in zip(ends, counts, strict=True)]
        summary.value.add(
            tag=tag,
            histo=HistogramProto(
                min=float(lo),
                max=ends[-1],
                num=sum(counts),
                sum=sum(m * c for m, c in middle),
                sum_squares=sum(m * m * c for m, c in middle),
                bucket_limit=[float(lo), *ends],
                bucket=[0.0, *map(float, counts)],
            ),
        )
    return summary
