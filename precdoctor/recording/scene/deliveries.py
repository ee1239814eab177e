"""Recent batches of data loaders and the data set indices of their samples, to name the bad ones after an incident.

Nothing is computed and no user code is called. A loader's iterator is asked for the indices it drew; the floating-point
tensors of a batch are kept by reference and read only once a step has gone wrong.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.data import Subset, dataloader
from torch.utils.data._utils.collate import default_collate

from precdoctor.recording.model import static, tensor_leaves
from precdoctor.recording.ops.tensor_facts import NEG_INF, badness, describe, readable
from precdoctor.recording.recorder.hook_guard import guarded
from precdoctor.recording.recorder.step_context import StepContext

#: Batches remembered: two, because prefetching scripts are one ahead. Largest batch in host memory to keep alive, in
#: bytes.
_BATCHES: Final = 2
_KEPT: Final = 64 << 20
#: Maximum number of fields, and of samples per field, in a report.
_MAX_FIELDS: Final = 8
_MAX_SAMPLES: Final = 16
#: Maximum depth of nested ``Subset``.
_MAX_SUBSETS: Final = 8


@dataclass(frozen=True)
class Field:
    """One tensor of a batch.

    Attributes:
        path: its name in the batch: ``0``, ``labels``, ``x``; empty if the batch is a single tensor.
    """

    path: str
    tensor: weakref.ref[Tensor]
    version: int

    def now(self) -> Tensor | None:
        """Return the tensor; None if it is gone or was written to since it was delivered."""
        x = self.tensor()
        return x if x is not None and tensor_leaves.version(x) == self.version else None


@dataclass(frozen=True)
class Delivery:
    """One batch as a data loader delivered it.

    Attributes:
        indices: its samples' indices in the data set, as drawn by the sampler; empty if unknown.
        in_order: whether row i surely holds ``indices[i]``: torch's own ``default_collate`` made the batch.
    """

    fields: tuple[Field, ...]
    indices: Sequence[int]
    in_order: bool
    #: Keeps a small batch in host memory alive until two more have been delivered.
    kept: tuple[Tensor, ...]

    @property
    def is_readable(self) -> bool:
        """Whether the batch has tensors, and all are alive and unchanged."""
        return bool(self.fields) and all(field.now() is not None for field in self.fields)


class Deliveries:
    """Patches the iterators of data loaders to remember recent batches."""

    def __init__(self, context: StepContext) -> None:
        self._context = context
        #: Per iterator the indices it drew, by the number of the batch.
        self._drawn: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()
        #: The latest batches, oldest first.
        self.latest: deque[Delivery] = deque(maxlen=_BATCHES)
        context.when_forked.append(self.clear)

    def clear(self) -> None:
        self._drawn.clear()
        self.latest.clear()

    def install(self) -> None:
        """Patch the iterators, once per process; a torch without them only costs the samples' names, with a warning."""
        try:
            base: Any = dataloader._BaseDataLoaderIter
            single: Any = dataloader._SingleProcessDataLoaderIter
            several: Any = dataloader._MultiProcessingDataLoaderIter
            draws = base._next_index
            gives = single._next_data, several._next_data
        except AttributeError:
            self._context.warnings.append("this torch does not show which samples a data loader draws")
            return
        context = self._context
        draw, deliver = guarded(context)(self._note_indices), guarded(context)(self._note_batch)

        @functools.wraps(draws)
        def _next_index(self: Any) -> Any:
            index = draws(self)
            if context.state != "off":
                draw(self, index)
            return index

        def giving(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
            @functools.wraps(original)
            def _next_data(self: Any) -> Any:
                batch = original(self)
                if context.state != "off":
                    deliver(self, batch)
                return batch

            return _next_data

        base._next_index = _next_index
        single._next_data, several._next_data = map(giving, gives)

    # --- one batch ---------------------------------------------------------------------------------------------------

    def _note_indices(self, iterator: Any, index: Any) -> None:
        """Note the indices that an iterator has drawn for its next batch; forget those of batches long delivered."""
        own = static.own(iterator)
        number = own.get("_send_idx", 0)  # workers are sent indices batches ahead
        drawn = self._drawn.setdefault(iterator, {})
        drawn[number] = index
        for old in [n for n in drawn if n < own.get("_rcvd_idx", 0) - 1]:
            del drawn[old]

    def _note_batch(self, iterator: Any, batch: Any) -> None:
        """Note a batch that an iterator has returned."""
        own = static.own(iterator)
        number = own["_rcvd_idx"] - 1 if "_rcvd_idx" in own else 0
        index = self._drawn.get(iterator, {}).get(number) if own.get("_in_order", True) is True else None
        found = [(name, x) for name, x in tensor_leaves.floating(batch, objects=True) if type(x) is Tensor]
        host = [x for _, x in found if x.is_cpu and x.layout is torch.strided]
        fields = tuple(Field(name, weakref.ref(x), tensor_leaves.version(x)) for name, x in found[:_MAX_FIELDS])
        collated = own.get("_collate_fn") is default_collate and own.get("_auto_collation") is True
        indices = _in_data_set(own.get("_dataset"), index)
        kept = tuple(host) if sum(x.nbytes for x in host) <= _KEPT else ()
        self.latest.append(Delivery(fields, indices, collated, kept))

    # --- after an incident -------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Return what an incident reports of the data.

        Returns:
            ``bad_fields``: facts of each non-finite tensor in a recent batch, latest batch first; a tensor whose only
            non-finite values are -Inf counts as a mask and is left out. ``data_is_finite``: whether there is none; None
            if none was found but not every tensor can be read any more.
        """
        bad = []
        for batch in reversed(self.latest):
            for field in batch.fields:
                x = field.now()
                if x is not None and badness(x.detach()) & ~NEG_INF:
                    bad.append({"field": field.path, **describe(x.detach()), **_samples(x.detach(), batch)})
        known = bool(self.latest) and all(batch.is_readable for batch in self.latest)
        return {"bad_fields": bad[:_MAX_FIELDS], "data_is_finite": not bad if known or bad else None}


def _samples(x: Tensor, batch: Delivery) -> dict[str, Any]:
    """Return the bad samples of a tensor: positions in the batch and, where known, indices in the data set."""
    real, count = readable(x), len(batch.indices)
    if real is None or x.dim() == 0:
        return {}
    bad = (~torch.isfinite(real)).reshape(len(real), -1).any(dim=1).nonzero().flatten().tolist()
    facts: dict[str, Any] = {"bad_samples": len(bad), "samples": bad[:_MAX_SAMPLES]}
    if count and count != len(x):  # rows are no samples: a batch of graphs holds the nodes of all of them
        facts["rows"] = True
    alone = [n for n in x.shape if n == count] == [count]  # else another dimension could be the samples
    if count == len(x) and (batch.in_order or alone):
        facts |= {"indices": [batch.indices[i] for i in bad[:_MAX_SAMPLES]], "in_order": batch.in_order or count == 1}
    return facts


def _in_data_set(dataset: Any, index: Any) -> Sequence[int]:
    """Return sample indices in the data set, through any ``Subset`` that a loader draws from; empty if unknown."""
    found: list[int] = [index] if type(index) is int else index
    if type(found) not in (list, tuple) or not all(type(i) is int for i in found):
        return ()
    for _ in range(_MAX_SUBSETS + 1):
        if type(dataset) is not Subset:
            return found
        own = static.own(dataset)
        part: Any = own.get("indices")
        if type(part) not in (list, tuple, range):
            return ()
        if not all(-len(part) <= i < len(part) and type(part[i]) is int for i in found):
            return ()
        chosen = [part[i] for i in found]
        found, dataset = chosen, own.get("dataset")
    return ()
