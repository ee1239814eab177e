"""Counts what Arrow allocates, for tests of what a log may cost."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

_POOLS: list[pa.MemoryPool] = []  # kept: buffers that outlive a call give their memory back to them


def memory_used_by(function: Callable[[], object]) -> int:
    """Most bytes that Arrow held meanwhile, from a pool that nothing else used before."""
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(pool)
    try:
        function()
    finally:
        pa.set_memory_pool(before)
    _POOLS.append(pool)
    return pool.max_memory()
