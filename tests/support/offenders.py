"""Many cases in one test: each is tried, and the failure names every one that does not hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest

Case = TypeVar("Case")


def check_each(check: Callable[[Case], None], cases: Iterable[Case], name: Callable[[Case], object] = str) -> None:
    """Fail with the name of each case that ``check`` refuses and the first lines of its reason."""
    offenders, tried = [], 0
    for case in cases:
        tried += 1
        try:
            check(case)
        except Exception as error:
            reason = "\n    ".join(str(error).splitlines()[:8])
            offenders.append(f"{str(name(case))[-100:]}: {type(error).__name__}: {reason}")
    assert tried, "a loop over nothing checks nothing"
    if offenders:
        pytest.fail(f"{len(offenders)} of {tried}:\n" + "\n".join(offenders), pytrace=False)
