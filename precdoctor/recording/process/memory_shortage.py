"""Checks whether limits on this process leave enough memory for a recorder. Imports no torch.

When memory runs out, allocations fail in libraries that then end the process or continue differently: OpenMP without
its threads, glibc without a thread's variables, Arrow without its file. So a recorder that might run short does not
begin, and a running one stops while there is still some left.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

_MIB = 1 << 20
#: Least address space left as recording begins. The recorder takes 350 MiB and up to twice ``--scene-memory``; the rest
#: is for what training has yet to allocate.
ADDRESS_SPACE = 2048 * _MIB
#: Least memory left as recording begins.
MEMORY = 512 * _MIB
#: Address space left below which recording stops.
RESERVE = 512 * _MIB
#: Positions in /proc/self/statm: pages of all mappings, and of data.
_SIZE, _DATA = 0, 5
_SPACES = (
    (resource.RLIMIT_AS, _SIZE, "address space (ulimit -v)"),
    (resource.RLIMIT_DATA, _DATA, "data segment (ulimit -d)"),
)
_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
#: Files of a cgroup, version 2 and version 1: limit, use, and the part of the use that the kernel frees by itself.
_FILES_2 = "memory.max", "memory.current", ("active_file", "inactive_file")
_FILES_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")
#: Version 1 writes no limit as a number this large or larger.
_NO_LIMIT = 1 << 60
_POOL_VARIABLE = "ARROW_DEFAULT_MEMORY_POOL"


def shortage() -> str | None:
    """Return why there is no room to record in this process; None if there is."""
    for left, what in _spaces():
        if left < ADDRESS_SPACE:
            return _sentence(left, what, ADDRESS_SPACE)
    for left in _memories():
        if left < MEMORY:
            return _sentence(left, "memory (of its cgroup)", MEMORY)
    return None


def running_out() -> str | None:
    """Return why recording should stop now; None if it need not. Returns at once if there is no limit."""
    return next((_sentence(left, what, RESERVE) for left, what in _spaces() if left < RESERVE), None)


@contextlib.contextmanager
def small_arrow() -> Iterator[None]:
    """If address space is limited, make a pyarrow imported inside allocate from malloc, in small pieces.

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
    """Iterate over what the limits of this process leave, in bytes, and the name of each limit."""
    limits = [(resource.getrlimit(number)[0], field, what) for number, field, what in _SPACES]
    limited = [each for each in limits if each[0] != resource.RLIM_INFINITY]
    if not limited:
        return
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - asked for on sampled steps
            pages = file.read().split()
    except OSError:
        return  # not Linux, where the use is unknown
    for limit, field, what in limited:
        yield limit - int(pages[field]) * resource.getpagesize(), what


def _memories() -> Iterator[int]:
    """Iterate over the bytes that each cgroup above this process leaves."""
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
    """Return the bytes that a cgroup leaves; None without a limit, or if it is not readable (as in containers)."""
    try:
        most = (folder / limit).read_text().strip()
        if most == "max" or int(most) >= _NO_LIMIT:
            return None
        known = dict(line.split(None, 1) for line in (folder / "memory.stat").read_text().splitlines())
        return int(most) - int((folder / use).read_text()) + sum(int(known.get(name, 0)) for name in given_back)
    except (OSError, ValueError):
        return None
