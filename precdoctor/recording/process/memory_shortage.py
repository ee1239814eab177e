"""Limits on this process's memory, and whether they leave room for a recorder. Imports no torch.

Where memory runs out, allocations fail in libraries that end the process then, or go on in another way: OpenMP without
its threads, glibc without a thread's variables, Arrow without its file. So a recorder that might be short of room does
not begin, and one that becomes so stops while there is still some left.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

_MIB = 1 << 20
#: Room that there must be as recording begins. Of address space the recorder itself takes 350 MiB and up to twice
#: ``--scene-memory``; the rest is for what training has yet to allocate.
ADDRESS_SPACE = 2048 * _MIB
#: ... of memory.
MEMORY = 512 * _MIB
#: Address space below which it stops.
RESERVE = 512 * _MIB
#: Numbers in /proc/self/statm: pages of all mappings, and of data.
_SIZE, _DATA = 0, 5
_SPACES = (
    (resource.RLIMIT_AS, _SIZE, "address space (ulimit -v)"),
    (resource.RLIMIT_DATA, _DATA, "data segment (ulimit -d)"),
)
_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
#: Limit, use, and what of the use the kernel gives back by itself; of cgroups version 2 and 1.
_FILES_2 = "memory.max", "memory.current", ("active_file", "inactive_file")
_FILES_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")
#: Version 1 writes a limit that is none as a number.
_NO_LIMIT = 1 << 60
_POOL_VARIABLE = "ARROW_DEFAULT_MEMORY_POOL"


def shortage() -> str | None:
    """Why there is no room to record in this process; None when there is."""
    for left, what in _spaces():
        if left < ADDRESS_SPACE:
            return _sentence(left, what, ADDRESS_SPACE)
    for left in _memories():
        if left < MEMORY:
            return _sentence(left, "memory (of its cgroup)", MEMORY)
    return None


def running_out() -> str | None:
    """Why a recorder had better stop now; None when it need not, and at once where there is no limit."""
    return next((_sentence(left, what, RESERVE) for left, what in _spaces() if left < RESERVE), None)


@contextlib.contextmanager
def small_arrow() -> Iterator[None]:
    """Where address space is limited, have a pyarrow that is imported inside take it from malloc, in small pieces.

    Arrow's own allocators reserve 1 GiB at once.
    """
    if not any(_spaces()) or "pyarrow" in sys.modules or _POOL_VARIABLE in os.environ:
        yield
        return
    os.environ[_POOL_VARIABLE] = "system"
    try:
        yield
        sys.modules["pyarrow"].default_memory_pool()  # Arrow reads the variable once, here
    finally:
        del os.environ[_POOL_VARIABLE]


def _sentence(left: int, what: str, wanted: int) -> str:
    return f"{max(0, left) // _MIB} MiB of {what} are left, and recording needs {wanted // _MIB} MiB"


def _spaces() -> Iterator[tuple[int, str]]:
    """What limits of this process leave, in bytes, and of what."""
    limits = [(resource.getrlimit(number)[0], field, what) for number, field, what in _SPACES]
    limited = [each for each in limits if each[0] != resource.RLIM_INFINITY]
    if not limited:
        return
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - asked for on sampled steps
            pages = file.read().split()
    except OSError:
        return  # not Linux, where nothing says what is in use
    for limit, field, what in limited:
        yield limit - int(pages[field]) * resource.getpagesize(), what


def _memories() -> Iterator[int]:
    """Bytes that each cgroup above this process leaves."""
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, files = (_CGROUPS / "memory", _FILES_1) if controllers else (_CGROUPS, _FILES_2)
        folder = base / path.lstrip("/")
        for each in (folder, *folder.parents):
            if (left := _left_in(each, *files)) is not None:
                yield left
            if each == base:
                break


def _left_in(folder: Path, limit: str, use: str, given_back: tuple[str, ...]) -> int | None:
    """Bytes; None where there is no limit, or nothing that can be read: in a container most of the path is not."""
    try:
        most = (folder / limit).read_text().strip()
        if most == "max" or int(most) >= _NO_LIMIT:
            return None
        known = dict(line.split(None, 1) for line in (folder / "memory.stat").read_text().splitlines())
        return int(most) - int((folder / use).read_text()) + sum(int(known.get(name, 0)) for name in given_back)
    except (OSError, ValueError):
        return None
