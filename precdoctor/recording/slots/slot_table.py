"""The table from tensors to slots, and the entries of the slots that the current step has used."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from precdoctor.recording import kernels
from precdoctor.recording.model.module_names import Names, Place

if TYPE_CHECKING:
    from precdoctor.recording.slots.cast_operand import Operand
    from precdoctor.recording.slots.group_sums import GroupSums
    from precdoctor.recording.slots.logit_sample import Sharpness

#: Kinds too large to fingerprint on a GPU; weights, gradients of weights, batches and buffers have fingerprints.
_WITHOUT_FINGERPRINT = frozenset({"input", "output", "grad_output", "update", "logits", "kv_key", "kv_value"})
#: Kinds with blocks of 16 elements.
_WITH_BLOCK16 = frozenset({"weight", "fp8_operand", "subbyte_operand", "kv_key", "kv_value"})

#: Kinds whose names come from the script: keys and positions in a module's arguments and results.
_NAMED_BY_SCRIPT = frozenset({"batch", "input", "output", "grad_output"})
#: Maximum number of names per module and kind; all further ones share the name OTHERS. A script that uses sample ids as
#: keys has new names in each step, and every name takes a slot for good.
MOST_NAMES = 256
OTHERS = "*"


class Site(NamedTuple):
    """The key of a tensors row, with the facts that are constant for it."""

    place: Place
    kind: str
    name: str
    call: int
    phase: str
    dtype: str
    #: Whether the root was in evaluation mode in the forward pass: the row is kept only if training depends on it.
    evaluating: bool = False


@dataclass(slots=True)
class Entry:
    """The facts that the host has of a slot's content in the current step."""

    slot: int
    site: Site
    device: torch.device
    shape: tuple[int, ...] = ()
    #: The micro-steps of the first and the last tensor measured into the slot.
    first_micro_step: int | None = None
    micro_step: int = 0
    #: For evaluation-mode sites: whether a backward pass went through the tensor.
    reached_by_backward: bool = False
    #: Whether the tensor carries the loss scale although its kind does not show it.
    scaled: bool = False
    #: For a tensor about to be cast to float8: the facts of the cast.
    operand: Operand | None = None
    #: For a tensor stored in another format than the measured elements: that format.
    format: str | None = None
    #: For logits: the role of the softmax that reads them, and how sharp it is.
    sharpness: Sharpness | None = None
    #: For an inference run: sums of each tensor that was measured into the slot.
    groups: list[GroupSums] = field(default_factory=list)

    def counts_as_training(self, names: Names) -> bool:
        """False for an evaluation pass: under no_grad in a root that trains, or with grad but without a backward."""
        if not self.site.evaluating:
            return True
        if self.site.phase == "no_grad":
            root = names.roots.get(self.site.place.root)
            return root is None or not root.trained
        return self.reached_by_backward


class SlotTable:
    """The slots of all sites, and the entries that the current step has touched.

    Args:
        inference: the run may be one of inference: activations get blocks of 16 also.
        crowded: called once, with the first place and kind that exceeds :data:`MOST_NAMES`.
    """

    def __init__(
        self, *, inference: bool = False, crowded: Callable[[Place, str], None] = lambda _place, _kind: None
    ) -> None:
        self._slots: dict[tuple[Site, torch.device], int] = {}
        #: Guards new slots: gradients arrive on one thread per device.
        self._growing = threading.Lock()
        self._sites: dict[Any, Site] = {}
        #: Names that the script gave, by place and kind.
        self._names: dict[tuple[Place, str], set[str]] = {}
        self._crowded, self._is_crowded = crowded, False
        self.touched: dict[int, Entry] = {}
        self._with_block16 = _WITH_BLOCK16 | {"input", "output"} if inference else _WITH_BLOCK16

    def __len__(self) -> int:
        return len(self._slots)

    def site(
        self,
        place: Place,
        kind: str,
        name: str,
        x: Tensor,
        *,
        call: int = 0,
        phase: str = "train",
        evaluating: bool = False,
    ) -> Site:
        """Return the site of ``x``, the same object every time; one shared site for names beyond :data:`MOST_NAMES`."""
        key = (place, kind, name, x.dtype, call, phase, evaluating)
        site = self._sites.get(key)
        if site is None:
            if kind in _NAMED_BY_SCRIPT and name != OTHERS and self._exceeds_names(place, kind, name):
                return self.site(place, kind, OTHERS, x, call=call, phase=phase, evaluating=evaluating)
            dtype = str(x.dtype).removeprefix("torch.")
            site = self._sites[key] = Site(place, kind, name, call, phase, dtype, evaluating)
        return site

    def _exceeds_names(self, place: Place, kind: str, name: str) -> bool:
        """Note a name, unless the place and kind have too many; report the first such case."""
        names = self._names.setdefault((place, kind), set())
        if name not in names and len(names) >= MOST_NAMES:
            if not self._is_crowded:
                self._is_crowded = True
                self._crowded(place, kind)
            return True
        names.add(name)
        return False

    def entry(self, site: Site, device: torch.device) -> Entry:
        """Return the entry of a site in this step; create it for the site's first tensor."""
        slot = self._slots.get((site, device))
        if slot is None:
            with self._growing:
                slot = self._slots.setdefault((site, device), len(self._slots))
            if site.kind in self._with_block16:
                kernels.want_block16(slot)
            if site.kind not in _WITHOUT_FINGERPRINT:
                kernels.want_fingerprint(slot)
        entry = self.touched.get(slot)
        if entry is None:
            entry = self.touched[slot] = Entry(slot, site, device)
        return entry

    def take(self) -> list[Entry]:
        """Return the step's entries, and start the next step empty."""
        entries = list(self.touched.values())
        self.touched = {}
        return entries

    def evaluations(self) -> Iterator[Entry]:
        """Return the entries of evaluation-mode forward passes."""
        return (e for e in self.touched.values() if e.site.evaluating)
