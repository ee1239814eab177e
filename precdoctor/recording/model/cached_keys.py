"""Finds the keys and values that attention caches from one token to the next, wherever a model stores them.

Recognised are the caches of Hugging Face's Transformers, tuples and lists of ``(key, value)`` per layer, objects and
dictionaries that hold a pair under one of :data:`PAIRS`, and modules with such a pair. None of their code runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

from precdoctor.recording.model import static, tensor_leaves

#: Names of key and value. With the last pair, tokens come before heads in the shape, as in Meta's code of Llama.
PAIRS: Final = (
    *(("keys", "values"), ("key_cache", "value_cache"), ("k_cache", "v_cache"), ("past_key", "past_value")),
    *(("key", "value"), ("k", "v"), ("cache_k", "cache_v")),
)
_TOKENS_FIRST: Final = PAIRS[-1]
#: Names that mean a cache even in a module; the other pairs also name layers and attributes of modules.
_OF_MODULES: Final = (*PAIRS[1:4], _TOKENS_FIRST)
#: Attributes in which caches store their layers, or other caches.
_PARTS: Final = ("layers", "self_attention_cache", "cross_attention_cache")
#: Names of a cache among arguments and results. Under any other name only nested pairs count as a cache.
_NAMES: Final = frozenset(
    ("past_key_values", "past_key_value", "layer_past", "past", "presents", "cache", "caches", "kv_cache", "kv_caches")
)
_MAX_DEPTH, _MAX_LAYERS = 4, 1024


class KeysAndValues(NamedTuple):
    """Keys and values of one layer, each of shape (sequences, heads, tokens, features).

    Attributes:
        layer: its number among the layers of its cache.
        part: ``cross`` in a cache of another sequence; else empty.
    """

    layer: int
    part: str
    key: Tensor
    value: Tensor


def cached(values: Mapping[Any, Any] | None) -> list[KeysAndValues]:
    """Return the layers of the first cache among named or numbered values, in order; empty if there is none."""
    for name, value in (values or {}).items():
        named = name in _NAMES if type(name) is str else False
        nested = not issubclass(type(value), (Tensor, nn.Module)) and (named or not _is_pair(value))
        if nested and (found := list(_layers(value, "", 0))):
            numbered: dict[str, int] = {}
            for i, (_, part, key, value_) in enumerate(found):
                found[i] = KeysAndValues(numbered.get(part, 0), part, key, value_)
                numbered[part] = numbered.get(part, 0) + 1
            return found
    return []


def results(value: Any) -> dict[Any, Any]:
    """Return a model's results by name or position."""
    if (entries := static.entries(value)) is not None:
        return {static.text(key): entry for key, entry in dict.items(entries)}
    return dict(enumerate(static.elements(value)))


def held_by_modules(root: nn.Module) -> Iterator[tuple[nn.Module, Tensor, Tensor]]:
    """Iterate over the modules that hold a pair as buffers or attributes, with key and value."""
    for module in static.modules(root):
        own: dict[str, Any] = static.module_dict(module)
        buffers: dict[str, Any] = static.held(module, "_buffers")
        for names in _OF_MODULES:
            key, value = (own.get(name, buffers.get(name)) for name in names)
            if _are_key_and_value(key, value):
                yield module, *_heads_first(names, key, value)
                break


def attention_modules(root: nn.Module) -> dict[int, nn.Module]:
    """Return the attention module of each layer, by its number in Transformers (``layer_idx``)."""
    found: dict[int, nn.Module] = {}
    for module in static.modules(root):
        number = dict.get(static.module_dict(module), "layer_idx")
        is_attention = "ttention" in type(module).__name__
        if type(number) is int and (is_attention or number not in found):
            found[number] = module
    return found


def _layers(value: Any, part: str, depth: int) -> Iterator[KeysAndValues]:
    """Iterate over the pairs in a value, with ``layer`` 0; ``depth`` bounds the nesting."""
    kind = type(value)
    if depth > _MAX_DEPTH or value is None or issubclass(kind, (Tensor, nn.Module, type, str)):
        return
    if issubclass(kind, (list, tuple)):
        if _is_pair(value):
            yield KeysAndValues(0, part, *static.elements(value)[:2])
            return
        for element in static.elements(value)[:_MAX_LAYERS]:
            yield from _layers(element, part, depth + 1)
        return
    entries = static.entries(value)
    own: dict[Any, Any] = static.own(value) if entries is None else entries
    for names in PAIRS:
        key, value_ = (dict.get(own, name) for name in names)
        if _are_key_and_value(key, value_):
            yield KeysAndValues(0, part, *_heads_first(names, key, value_))
            return
        if type(key) is list and type(value_) is list:
            for pair in zip(key[:_MAX_LAYERS], value_, strict=False):
                if _are_key_and_value(*pair):
                    yield KeysAndValues(0, part, *pair)
            return
    inside = list(dict.values(own))[:_MAX_LAYERS] if entries is not None else [dict.get(own, n) for n in _PARTS]
    for name, element in zip(_PARTS if entries is None else [""] * len(inside), inside, strict=True):
        yield from _layers(element, "cross" if name.startswith("cross") else part, depth + 1)


def _is_pair(value: Any) -> bool:
    """Return whether a sequence begins with key and value; some models append two more, of the encoder."""
    elements = static.elements(value)
    return 2 <= len(elements) <= 4 and _are_key_and_value(*elements[:2])


def _are_key_and_value(key: Any, value: Any) -> bool:
    """Return whether two values are readable tensors of the same four-dimensional shape, up to the features."""
    if not (issubclass(type(key), Tensor) and issubclass(type(value), Tensor)):
        return False
    if tensor_leaves.plain(key) is None or tensor_leaves.plain(value) is None:
        return False
    return bool(key.dim() == value.dim() == 4 and key.shape[:3] == value.shape[:3])


def _heads_first(names: tuple[str, str], key: Any, value: Any) -> tuple[Tensor, Tensor]:
    return (key.transpose(1, 2), value.transpose(1, 2)) if names == _TOKENS_FIRST else (key, value)
