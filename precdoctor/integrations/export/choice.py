"""Which tensors are exported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import pyarrow as pa
import pyarrow.compute as pc

from precdoctor.runlog import Run


@dataclass(frozen=True)
class Choice:
    """Tensors of these kinds in modules with these names; empty means all.

    Attributes:
        kinds: as the column ``kind`` has them.
        modules: globs.
    """

    kinds: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()

    def batches(self, run: Run, table: str, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """The rows of a table: of tensors the chosen ones, of the others all. ``columns`` must name ``module``."""
        filters = [("kind", "in", list(self.kinds))] if table == "tensors" and self.kinds else None
        for batch in run.batches(table, columns, filters):
            chosen = self._of_modules(batch) if table == "tensors" and self.modules else batch
            if chosen.num_rows:
                yield chosen

    def _of_modules(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        module = batch.column("module")
        names = pc.unique(module).to_pylist()
        wanted = [name for name in names if any(fnmatchcase(name, glob) for glob in self.modules)]
        return batch.filter(pc.is_in(pc.cast(module, pa.string()), pa.array(wanted, pa.string())))
