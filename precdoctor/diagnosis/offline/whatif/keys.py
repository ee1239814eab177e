"""Numbers for the tensors in record batches, the same from batch to batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

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
        code = np.zeros(batch.num_rows, dtype=np.int64)
        columns: list[tuple[list[str], Ints]] = []
        for name in KEY_COLUMNS:
            encoded = batch.column(name)
            if not pa.types.is_dictionary(encoded.type):
                encoded = encoded.dictionary_encode()
            values = [*(value or "" for value in encoded.dictionary.to_pylist()), ""]  # the last one stands for null
            indices = encoded.indices.fill_null(len(values) - 1).to_numpy(zero_copy_only=False).astype(np.int64)
            columns.append((values, indices))
            # Renumbered after each column, because the product of five long dictionaries could exceed int64.
            _, first, code = np.unique(code * len(values) + indices, return_index=True, return_inverse=True)
        if batch.num_rows == 0:
            return code
        numbers = [self._number(TensorKey(*(v[indices[row]] for v, indices in columns))) for row in first.tolist()]
        return np.array(numbers, dtype=np.int64)[code]

    def _number(self, key: TensorKey) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self.known) if self._wanted(key) else -1
            if self._numbers[key] >= 0:
                self.known.append(key)
        return self._numbers[key]
