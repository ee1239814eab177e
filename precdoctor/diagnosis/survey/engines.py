"""Executors that read the pieces of a log: this process, processes of this machine, or workers of a Dask cluster."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import TYPE_CHECKING, Protocol, TypeVar

import pyarrow as pa

from precdoctor.errors import UsageError
from precdoctor.runlog.part_cache import PartCache
from precdoctor.runlog.pieces import Piece, checked_engine

if TYPE_CHECKING:
    from precdoctor.runlog.reader import Run

#: Opening a part takes as long as reading this many rows.
_OPENING = 1 << 11
#: Rows from which other processes are started; starting them takes about as long as reading a million rows.
WORTH_IT = 1 << 22
_Task_contra = TypeVar("_Task_contra", contravariant=True)
_Result_co = TypeVar("_Result_co", covariant=True)


class _Worker(Protocol[_Task_contra, _Result_co]):
    """A module-level function whose task and result can be pickled."""

    def __call__(self, task: _Task_contra, cache: PartCache | None = None, /) -> _Result_co: ...


def run_all(
    what: str,
    function: _Worker[_Task_contra, _Result_co],
    tasks: Sequence[_Task_contra],
    run: Run,
    pieces: Sequence[Piece],
) -> Iterator[_Result_co]:
    """Yield ``function(task)`` in the order of ``tasks``, computed by the engine of ``run``; reports progress.

    Args:
        what: the word for the tasks in the progress report.
        function: called with the run's part cache if it runs in this process, without it in others.
        pieces: all pieces that the tasks read; their number of rows decides whether other processes are worth it.

    Raises:
        UsageError: Dask is not installed or cannot be reached, or its workers cannot see the run.
    """
    weight = sum(p.rows + _OPENING for p in pieces)
    if run.is_copy and (run.engine or "").startswith("dask:"):
        raise UsageError(f"workers at {run.engine} cannot see the copy of {run.origin}; copy the run to where they do")
    with _executor(run.engine, len(tasks), weight) as executor:
        results = (function(t, run.cache) for t in tasks) if executor is None else executor.map(function, tasks)
        for done, result in enumerate(results, 1):
            yield result
            run.progress(what, done, len(tasks))


@contextlib.contextmanager
def _executor(engine: str | None, tasks: int, rows: int) -> Iterator[Executor | None]:
    """Yield the executor of an engine such as ``local:4`` or ``dask:tcp://...``; None means this process."""
    kind, _, argument = (checked_engine(engine) or "local").partition(":")
    if kind == "dask":
        with _environment_kept(), _dask(argument) as executor:
            yield executor
        return
    workers = min(tasks, int(argument) if argument else os.cpu_count() or 1)
    if workers < 2 or (not argument and rows < WORTH_IT):
        yield None
        return
    spawned = multiprocessing.get_context("spawn")
    # without the limit, Arrow would start a thread per core in each process
    with ProcessPoolExecutor(workers, spawned, initializer=pa.set_cpu_count, initargs=(1,)) as pool:
        yield pool


@contextlib.contextmanager
def _dask(address: str) -> Iterator[Executor]:
    """Yield the executor of a Dask cluster; raises UsageError if Dask is missing or no scheduler answers."""
    try:
        from distributed import Client
    except ImportError:
        raise UsageError("--engine dask needs Dask; install it with: pip install distributed") from None
    try:
        # tcp://host:port; without an address a local cluster that ends with the command (any free dashboard port)
        own = {} if address else {"dashboard_address": "127.0.0.1:0"}
        client = Client(address or None, set_as_default=False, **own)
    except (OSError, ValueError) as error:
        raise UsageError(f"no Dask scheduler answers at {address or 'this machine'!r}: {error}") from None
    with client:
        yield client.get_executor(pure=False, retries=2)


@contextlib.contextmanager
def _environment_kept() -> Iterator[None]:
    """Restore the environment variables at exit: Dask sets some (one thread per worker) in this process for its own."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
