"""Who reads the pieces of a log: this process, processes of this machine, or the workers of a Dask cluster."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import TypeVar

from precdoctor.errors import UsageError

#: Rows from which on other processes are worth their start, which takes about as long as reading a million rows.
WORTH_IT = 1 << 22
_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


def run_all(
    function: Callable[[_Task], _Result],
    tasks: Sequence[_Task],
    *,
    engine: str | None,
    rows: int,
    progress: Callable[[int, int], None] = lambda _done, _of: None,
) -> Iterator[_Result]:
    """``function`` of each task, in the order of ``tasks``.

    Args:
        function: a function of a module, which takes and returns what can be pickled.
        tasks: what to do.
        engine: None, ``local:N``, ``dask`` or ``dask:ADDRESS``; None decides by ``rows``.
        rows: that are read in all.
        progress: called with the number of tasks that are done, and of all.

    Raises:
        UsageError: an unknown engine, or Dask is not installed or cannot be reached.
    """
    with _executor(engine, len(tasks), rows) as executor:
        results = map(function, tasks) if executor is None else executor.map(function, tasks)
        for done, result in enumerate(results, 1):
            yield result
            progress(done, len(tasks))


def check_engine(engine: str | None) -> str | None:
    """The name of an engine as it was given.

    Raises:
        UsageError: there is no such engine.
    """
    kind, _, argument = (engine or "local").partition(":")
    workers = not argument or (argument.isdecimal() and int(argument) > 0)
    if kind not in ("local", "dask") or (kind == "local" and not workers):
        raise UsageError(f"--engine takes local, local:WORKERS, dask or dask:ADDRESS, got {engine!r}")
    return engine


@contextlib.contextmanager
def _executor(engine: str | None, tasks: int, rows: int) -> Iterator[Executor | None]:
    """None means this process."""
    kind, _, argument = (check_engine(engine) or "local").partition(":")
    if kind == "dask":
        with _dask(argument) as executor:
            yield executor
        return
    workers = min(tasks, int(argument) if argument else os.cpu_count() or 1)
    if workers < 2 or (not argument and rows < WORTH_IT):
        yield None
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@contextlib.contextmanager
def _dask(address: str) -> Iterator[Executor]:
    try:
        from distributed import Client
    except ImportError:
        raise UsageError("--engine dask needs Dask; install it with: pip install 'precdoctor[dask]'") from None
    try:
        # tcp://host:port, or a cluster of this machine that ends with the command
        client = Client(address or None, set_as_default=False, **({} if address else {"dashboard_address": None}))
    except (OSError, ValueError) as error:
        raise UsageError(f"no Dask scheduler answers at {address or 'this machine'!r}: {error}") from None
    with client:
        yield client.get_executor(pure=False, retries=2)
