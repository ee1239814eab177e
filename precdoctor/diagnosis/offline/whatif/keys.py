"""Numbers for the tensors in record batches, the same from batch to batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from precdoctor.diagnosis.survey.totals import grouped
from precdoctor.numerics.arrays import Ints

#: Columns that identify a tensor; its steps, ranks and calls are not distinguished.
KEY_COLUMNS = ("root", "module", "kind", "name", "dtype")


@dataclass(frozen=True, order=True)
class TensorKey:
    """One tensor of the model, over all steps, ranks and calls."""

    root: str
    module: str
    kind: str
    name: str
    dtype: str


class Keys:
    """Numbers tensors in order of first appearance; those that ``wanted`` rejects get -1."""

    def __init__(self, wanted: Callable[[TensorKey], bool]) -> None:
        self._wanted = wanted
        self._numbers: dict[TensorKey, int] = {}
        #: The tensors by number.
        self.known: list[TensorKey] = []

    def of(self, batch: pa.RecordBatch) -> Ints:
        """Return the number of each row's tensor, shape ``(rows,)``; the batch has the columns :data:`KEY_COLUMNS`."""
        first, code = np.unique(grouped(batch, KEY_COLUMNS), return_index=True, return_inverse=True)[1:]
        names = batch.select(KEY_COLUMNS).take(pa.array(first)).to_pydict().values()
        numbers = [self._number(TensorKey(*(name or "" for name in key))) for key in zip(*names, strict=True)]
        return np.array(numbers, dtype=np.int64)[code]

    def _number(self, key: TensorKey) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self.known) if self._wanted(key) else -1
            if self._numbers[key] >= 0:
                self.known.append(key)
        return self._numbers[key]
