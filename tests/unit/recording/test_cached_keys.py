"""Caches of keys and values, as models keep them; none of their code may run."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import pytest

torch = pytest.importorskip("torch")

from precdoctor.recording.model.cached_keys import (  # noqa: E402
    attention_modules,
    cached,
    held_by_modules,
    results,
)


def pair(tokens=5, heads=2):
    return torch.randn(1, heads, tokens, 4), torch.randn(1, heads, tokens, 4)


class Layer:
    def __init__(self, keys=None, values=None):
        self.keys, self.values = keys, values


class Cache:
    """As in Transformers from 4.56 on."""

    def __init__(self, *layers):
        self.layers = list(layers)

    def __getattr__(self, name):
        raise AssertionError(f"{name} was asked for")

    def __len__(self):
        raise AssertionError("its length was asked for")

    def __iter__(self):
        raise AssertionError("it was walked through")

    __getitem__ = __eq__ = __bool__ = __len__


class OldCache(Cache):
    def __init__(self, keys, values):
        self.key_cache, self.value_cache = keys, values


class Both(Cache):
    def __init__(self, own, other):
        self.self_attention_cache, self.cross_attention_cache = own, other


@dataclass
class ByName:
    k: torch.Tensor = field(default_factory=lambda: pair()[0])
    v: torch.Tensor = field(default_factory=lambda: pair()[1])


def shapes(found):
    return [(layer, part, tuple(key.shape)) for layer, part, key, _ in found]


TWO = [(0, "", (1, 2, 5, 4)), (1, "", (1, 2, 5, 4))]


@pytest.mark.parametrize(
    "cache",
    [
        Cache(Layer(*pair()), Layer(*pair())),
        OldCache([pair()[0], pair()[0]], [pair()[1], pair()[1]]),
        (pair(), pair()),
        [pair(), list(pair())],
        [(*pair(), *pair(7)), (*pair(), *pair(7))],
        [{"k": pair()[0], "v": pair()[1]}, OrderedDict(key=pair()[0], value=pair()[1])],
        {0: pair(), 1: pair()},
        [ByName(), ByName()],
        OrderedDict(k_cache=[pair()[0], pair()[0]], v_cache=[pair()[1], pair()[1]]),
    ],
    ids=lambda cache: type(cache).__name__,
)
def test_layers_are_found_in_order(cache):
    assert shapes(cached({"tokens": torch.ones(1, 3), "past_key_values": cache})) == TWO


def test_a_nest_of_pairs_needs_no_name_and_one_pair_does():
    assert shapes(cached({0: torch.randn(1, 2, 5, 4), 1: [pair(), pair()]})) == TWO
    assert cached({0: pair(), "images": pair()}) == []
    assert shapes(cached({"layer_past": pair()})) == TWO[:1]


def test_what_is_not_there_yet_and_what_is_no_pair_is_left_out():
    assert cached({"past_key_values": Cache(Layer(), Layer(torch.zeros(1, 2, 0, 4), torch.zeros(1, 2, 0, 4)))}) == []
    assert cached({"cache": [(torch.randn(1, 2, 5, 4), torch.randn(1, 3, 5, 4))]}) == []
    assert cached({"cache": [(torch.randn(5, 4), torch.randn(5, 4))]}) == []
    assert cached({"cache": [(torch.ones(1, 2, 5, 4, dtype=torch.int8),) * 2]}) == []
    assert cached({"cache": object(), 0: Cache()}) == []
    assert cached(None) == []


def test_layers_that_attend_elsewhere_are_a_part_of_their_own():
    found = cached({"past_key_values": Both(Cache(Layer(*pair()), Layer(*pair())), OldCache(*map(list, zip(pair(9)))))})
    assert shapes(found) == [*TWO, (0, "cross", (1, 2, 9, 4))]


def test_results_go_by_name_or_place():
    assert set(results(OrderedDict(logits=1, past_key_values=2))) == {"logits", "past_key_values"}
    assert results((1, 2)) == {0: 1, 1: 2}
    assert results(torch.ones(2)) == {}


def test_modules_that_keep_a_cache_of_their_own():
    class Kv(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("k_cache", pair()[0])
            self.register_buffer("v_cache", pair()[1])

    class Meta(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.cache_k, self.cache_v = torch.randn(1, 16, 2, 4), torch.randn(1, 16, 2, 4)

    model = torch.nn.Sequential(Kv(), Meta(), torch.nn.Linear(2, 2))
    found = list(held_by_modules(model))
    assert [(type(m).__name__, tuple(k.shape), tuple(v.shape)) for m, k, v in found] == [
        ("Kv", (1, 2, 5, 4), (1, 2, 5, 4)),
        ("Meta", (1, 2, 16, 4), (1, 2, 16, 4)),
    ]


def test_attention_goes_before_what_else_has_the_number_of_a_layer():
    class Numbered(torch.nn.Module):
        def __init__(self, number, inner=None):
            super().__init__()
            self.layer_idx, self.inner = number, inner

    class Attention(Numbered):
        pass

    inner = Attention(1)
    found = attention_modules(torch.nn.ModuleList([Numbered(0), Numbered(1, inner), Numbered(1), Numbered("2")]))
    assert set(found) == {0, 1} and found[1] is inner
