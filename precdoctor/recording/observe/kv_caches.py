"""Keys and values of an inference run: what a cache holds when its model returns, or what attention reads.

The cache of a top-level call is looked for among its arguments, its results and its modules. Where there is none,
``scaled_dot_product_attention`` shows what it was given, if it looks back: causally, or at more keys than queries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, nn

from precdoctor.recording.model import cached_keys, static, tensor_leaves
from precdoctor.recording.model.module_names import Place
from precdoctor.recording.recorder import Recorder

if TYPE_CHECKING:
    from precdoctor.recording.observe.call_frame import Frame

_KINDS: Final = ("kv_key", "kv_value")


class KvCaches:
    """One per recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        #: Roots that keep a cache which can be found: attention need not show them.
        self._known: set[str] = set()
        #: Slots of this call that hold what attention was given.
        self._shown: list[int] = []
        #: Arguments of the top-level call that is looked at; null outside of one.
        self.given: dict[Any, Any] | None = None
        self._layers: static.ByIdentity[nn.Module, dict[int, nn.Module]] = static.ByIdentity()
        recorder.when_forked.append(self._reset)

    def _reset(self) -> None:
        self._known.clear()
        self._shown, self.given = [], None

    def takes(self) -> bool:
        """Whether keys and values have rows in this step."""
        recorder = self._recorder
        return recorder.live and recorder.claim.forwards_are_steps and any(map(recorder.options.takes, _KINDS))

    def root_begins(self, frame: Frame, given: dict[Any, Any]) -> None:
        """A top-level call begins, on a step that :meth:`takes` speaks of."""
        self._shown, self.given = [], given if frame.recorded else None

    def root_ended(self, frame: Frame, result: Any) -> None:
        """It has returned, or raised: its cache is as long as it gets in this step."""
        given, self.given = self.given, None
        if given is None or result is None or frame.place is None:
            return
        # A cache that was given is an object that has grown meanwhile, or tensors from before this call.
        found = cached_keys.cached(cached_keys.results(result)) or cached_keys.cached(given)
        held = [] if found else list(cached_keys.held_by_modules(frame.module))
        if not found and not held:
            return
        self._known.add(frame.place.root)
        for slot in self._shown:  # the same, as attention was given it
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
        """Attention is given keys and values."""
        if self.given is None or frame is None or frame.place is None or frame.place.root in self._known:
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
        recorder = self._recorder
        if not recorder.wants(place):
            return
        for kind, x in zip(_KINDS, (key, value), strict=True):
            dense = tensor_leaves.plain(x)
            if dense is None:
                continue
            mode = frame.mode
            site = recorder.site(place, kind, name, x, call=frame.call, phase=mode.phase, evaluating=mode.evaluating)
            entry = recorder.measure(site, x, dense, restart=bool(self._shown) and not shown)
            if shown and entry is not None:
                self._shown.append(entry.slot)
