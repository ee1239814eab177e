"""A run that counts how often it is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from precdoctor.runlog import Run


class Counted(Run):
    """A run that counts passes over its tensors, and the steps that are asked for besides."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.path, run.info)
        self.passes = 0
        self.asked: list[Any] = []

    def every_row(self, *arguments: Any, **options: Any) -> Iterator[pa.RecordBatch]:
        self.passes += 1
        return super().every_row(*arguments, **options)

    def batches(self, name: str, columns: Any = None, filters: Any = None) -> Iterator[pa.RecordBatch]:
        if name == "tensors":
            self.asked.append(filters)
        return super().batches(name, columns, filters)
