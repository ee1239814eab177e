"""The names of the files in a run directory. Does not import pyarrow, so that looking for a run stays cheap.

Layout (one directory per process that trained; ``NNNNN`` is the global rank)::

    RUN/run.json                          by the parent at launch
    RUN/attach.jsonl                      how far each process that was offered recording got
    RUN/halt.json                         by ``record --halt-on``: why the run is to stop
    RUN/rank-NNNNN[.attempt]/rank.json    facts of the process: modules, parameters, optimizers, versions
    RUN/rank-NNNNN/TABLE-000001.parquet   sealed parts
    RUN/rank-NNNNN/TABLE-000002.arrows.open   the part being written: an Arrow IPC stream
    RUN/rank-NNNNN/parts.jsonl            one line per sealed part: name, rows, step range, blake2b
    RUN/rank-NNNNN/end.json               a clean close
"""

from __future__ import annotations

import re
from typing import Final

from precdoctor._attach_file import ATTACH_FILE as ATTACH_FILE  # noqa: PLC0414 - re-exported

#: Incremented whenever the meaning of a column changes. Readers accept older logs and refuse newer ones.
SCHEMA_VERSION: Final = 1

RUN_FILE: Final = "run.json"
RANK_FILE: Final = "rank.json"
#: Request to stop a running run, from any process: ``{"message": ...}``.
HALT_FILE: Final = "halt.json"
PARTS_FILE: Final = "parts.jsonl"
END_FILE: Final = "end.json"
#: The second, traced run of ``precdoctor autopsy``: a run directory in the first.
AUTOPSY_DIR = "autopsy"
#: ``rank-00003`` or, for the second process that claimed rank 3, ``rank-00003.1``.
RANK_DIR: Final = re.compile(r"rank-(\d{5})(?:\.(\d{1,4}))?")
SEALED_PART: Final = re.compile(r"(tensors|steps|events|ops)-(\d{6})\.parquet")
OPEN_PART: Final = re.compile(r"(tensors|steps|events|ops)-(\d{6})\.arrows\.open")
#: A file that is being written; :func:`~precdoctor.runlog.sealing.seal` removes those that a dead writer left.
TEMPORARY: Final = re.compile(r"\..+\.tmp")
