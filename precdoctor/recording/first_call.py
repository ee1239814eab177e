"""The first call of a top-level module, which may write into parameters: scales taken from the data (ActNorm, weight
normalisation), codebooks filled with samples.

What it wrote to shows by the version counters. Values from before are not kept; flags such as ``ready`` are,
until the call has returned, and for the rest of the step if it did write.
"""

from __future__ import annotations

import weakref

from torch import Tensor, nn

from precdoctor.recording import leaves, static
from precdoctor.recording.microscope.restore import Attributes
from precdoctor.recording.naming import unwrap


class FirstCall:
    """Made as a module is called for the first time; :meth:`ends` tells what it wrote to."""

    def __init__(self, module: nn.Module) -> None:
        own = unwrap(module)
        #: Plain attributes of every module as they were.
        self.attributes = Attributes(static.modules(own))
        self._versions = [(name, weakref.ref(p), leaves.version(p)) for name, p in static.named_parameters(own)]

    def ends(self) -> frozenset[str]:
        """Names of the parameters that have been written to since."""
        now = ((name, ref(), version) for name, ref, version in self._versions)
        return frozenset(name for name, p, version in now if isinstance(p, Tensor) and leaves.version(p) != version)


class FirstCalls:
    """Which modules have been called, and which parameters their first calls wrote to."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[nn.Module], frozenset[str]]] = {}

    def begins(self, module: nn.Module) -> FirstCall | None:
        """Null when it has been called before."""
        known = self._known.get(id(module))
        if known is not None and known[0]() is module:
            return None
        self._known[id(module)] = (weakref.ref(module), frozenset())
        return FirstCall(module)

    def ended(self, module: nn.Module, first: FirstCall) -> frozenset[str]:
        """Names of the parameters that the first call has written to."""
        written = first.ends()
        self._known[id(module)] = (weakref.ref(module), written)
        return written

    def written(self, module: nn.Module) -> frozenset[str]:
        """Names of the parameters that forward passes of the module are known to write to."""
        known = self._known.get(id(module))
        return known[1] if known is not None and known[0]() is module else frozenset()
