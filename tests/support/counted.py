"""A run that counts how often it is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from precdoctor.runlog import Run
from precdoctor.runlog.pieces import Piece


class Counted(Run):
    """A run that counts passes over its tensors, and the steps that are asked for besides."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.path, run.info)
        self.passes = 0
        self.asked: list[Any] = []

    def pieces(self, table: str) -> list[Piece]:
        self.passes += table == "tensors"
        return super().pieces(table)

    def batches(self, name: str, columns: Any = None, filters: Any = None) -> Iterator[pa.RecordBatch]:
        if name == "tensors":
            self.asked.append(filters)
        return super().batches(name, columns, filters)
