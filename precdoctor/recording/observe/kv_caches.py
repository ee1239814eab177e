"""Records keys and values of an inference run: a cache's contents as its model returns, or what attention reads.

The cache of a top-level call is searched in its arguments, results and modules. If there is none, the arguments of
``scaled_dot_product_attention`` are recorded if it attends to the past: causally, or with more keys than queries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, nn

from precdoctor.recording.model import cached_keys, static
from precdoctor.recording.model.module_names import Place
from precdoctor.recording.recorder import Recorder

if TYPE_CHECKING:
    from precdoctor.recording.observe.call_frame import Frame

_KINDS: Final = ("kv_key", "kv_value")


class KvCaches:
    """Finds and records the caches of top-level calls. One per recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        #: Roots whose cache was found: rows of what their attention reads would repeat it.
        self._roots_with_cache: set[str] = set()
        #: Slots of this call with keys and values that attention read.
        self._attention_slots: list[int] = []
        #: Arguments of the current top-level call; None outside of such a call, or if it is not recorded.
        self.given: dict[Any, Any] | None = None
        self._layers: static.ByIdentity[nn.Module, dict[int, nn.Module]] = static.ByIdentity()
        recorder.when_forked.append(self._reset)

    def _reset(self) -> None:
        self._roots_with_cache.clear()
        self._attention_slots, self.given = [], None

    def takes(self) -> bool:
        """Return whether keys and values are recorded in this step."""
        recorder = self._recorder
        return recorder.live and recorder.claim.forwards_are_steps and any(map(recorder.options.takes, _KINDS))

    def root_begins(self, frame: Frame, given: dict[Any, Any]) -> None:
        """Note the arguments of a top-level call; call this only if :meth:`takes`."""
        self._attention_slots, self.given = [], given if frame.recorded else None

    def root_ended(self, frame: Frame, result: Any) -> None:
        """Record the cache as the top-level call returns: only then it is complete. ``result`` is None if it raised."""
        given, self.given = self.given, None
        if given is None or result is None or frame.place is None:
            return
        # If a cache was passed in, it is an object that has grown since, or tensors from before this call.
        found = cached_keys.cached(cached_keys.results(result)) or cached_keys.cached(given)
        held = [] if found else list(cached_keys.held_by_modules(frame.module))
        if not found and not held:
            return
        self._roots_with_cache.add(frame.place.root)
        for slot in self._attention_slots:  # attention read the same keys and values
            self._recorder.slots.touched.pop(slot, None)
        modules = self._modules(frame.module) if found else {}
        for layer, part, key, value in found:
            owner = modules.get(layer)
            place = self._recorder.names.find(owner) if owner is not None else None
            name = part if place is not None else f"{part}.{layer}" if part else str(layer)
            self._measure(frame, place or frame.place, name, key, value)
        for owner, key, value in held:
            self._measure(frame, self._recorder.names.find(owner) or frame.place, "", key, value)

    def attention_reads(self, frame: Frame | None, query: Tensor, key: Tensor, value: Any, *, causal: bool) -> None:
        """Record the keys and values that attention was given, if the root has no cache."""
        if self.given is None or frame is None or frame.place is None or frame.place.root in self._roots_with_cache:
            return
        if key.dim() != 4 or not issubclass(type(value), Tensor) or not (causal or query.shape[-2] < key.shape[-2]):
            return
        if frame.recorded and key.shape[:3] == value.shape[:3]:
            self._measure(frame, frame.place, "", key, value, shown=True)

    def _modules(self, root: nn.Module) -> dict[int, nn.Module]:
        known = self._layers.get(root)
        return self._layers.put(root, cached_keys.attention_modules(root)) if known is None else known

    def _measure(
        self, frame: Frame, place: Place, name: str, key: Tensor, value: Tensor, *, shown: bool = False
    ) -> None:
        """Make the rows of one layer's key and value; ``shown``: as attention read them."""
        recorder = self._recorder
        if not recorder.wants(place):
            return
        for kind, x in zip(_KINDS, (key, value), strict=True):
            restart, mode = bool(self._attention_slots) and not shown, frame.mode
            entry = recorder.measure(
                place, kind, name, x, call=frame.call, phase=mode.phase, evaluating=mode.evaluating, restart=restart
            )
            if shown and entry is not None:
                self._attention_slots.append(entry.slot)
