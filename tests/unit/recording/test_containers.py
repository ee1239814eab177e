"""Looking into the containers that batches come in, without running their code."""

from __future__ import annotations

import collections
import dataclasses
import types
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from precdoctor.recording.model import tensor_leaves

X, Y = torch.ones(2), torch.zeros(3)


@dataclasses.dataclass
class Record:
    x: object
    y: object


@dataclasses.dataclass(slots=True)
class Slotted:
    x: object
    y: object


class Pair(NamedTuple):
    x: object
    y: object


class Plain:
    def __init__(self, x, y):
        self.x, self.y = x, y


class Graph:
    """Keeps its elements two objects deep, as PyG's ``Data`` does."""

    def __init__(self, x, y):
        self.__dict__["_store"] = Plain.__new__(Plain)
        self.__dict__["_store"].__dict__["_mapping"] = {"x": x, "y": y}


class Encoding(collections.UserDict):
    pass


class Ordered(collections.OrderedDict):
    pass


def _refuses(*_args, **_kwargs):
    raise AssertionError("code of the user's has run")


_DUNDERS = (
    *("__getattribute__", "__getattr__", "__setattr__", "__iter__", "__len__", "__bool__", "__eq__", "__hash__"),
    *("__getitem__", "__contains__", "__repr__", "__str__", "__copy__", "__deepcopy__", "__reduce_ex__", "__reduce__"),
    *("__getstate__", "__setstate__", "__init__", "__new__", "__init_subclass__", "__class_getitem__", "__next__"),
)
_METHODS = ("items", "keys", "values", "get", "update", "copy", "x", "_fields", "data")


def _hostile(*bases: type, slots: tuple[str, ...] | None = None) -> type:
    """A class whose every method raises, with properties in place of what one may ask it for."""
    body = dict.fromkeys(_DUNDERS, _refuses) | {name: property(_refuses) for name in _METHODS}
    body["__class__"] = property(_refuses)
    if slots is not None:
        body = {k: v for k, v in body.items() if k not in slots} | {"__slots__": slots}
    return type("Hostile", bases, body)


def _names(value, **more):
    return [name for name, _ in tensor_leaves.tensors(value, **more)]


@pytest.mark.parametrize(
    "value",
    [
        {"x": X, "y": Y},
        Record(X, Y),
        Slotted(X, Y),
        Pair(X, Y),
        Plain(X, Y),
        Graph(X, Y),
        Encoding(x=X, y=Y),
        Ordered(x=X, y=Y),
        types.SimpleNamespace(x=X, y=Y),
    ],
    ids=lambda v: type(v).__name__,
)
def test_every_kind_of_batch_has_the_same_names_and_can_be_made_again(value):
    assert _names((value,), objects=True) == ["0.x", "0.y"]
    (made,) = tensor_leaves.mapped((value,), torch.clone, objects=True)
    assert type(made) is type(value)
    assert made is not value
    found, own = dict(tensor_leaves.tensors(made, objects=True)), dict(tensor_leaves.tensors(value, objects=True))
    assert list(found) == list(own) == ["x", "y"]
    assert all(torch.equal(found[n], own[n]) and found[n] is not own[n] for n in own)


def test_objects_of_any_class_are_arguments_and_no_outputs():
    assert _names(Plain(X, Y)) == []
    assert _names(Record(X, Y)) == ["x", "y"]
    assert _names(torch.nn.Linear(2, 2), objects=True) == []
    assert _names(Plain, objects=True) == []


@pytest.mark.parametrize("bases", [(), (dict,), (list,), (tuple,), (collections.OrderedDict,)])
def test_no_code_of_a_container_runs(bases):
    kind = _hostile(*bases)
    base = bases[0] if bases else object
    value = base.__new__(kind, (X,)) if base is tuple else base.__new__(kind)
    if base is list:
        list.append(value, X)
    elif base in (dict, collections.OrderedDict):
        base.__setitem__(value, "0", X)
    elif base is object:
        kind.__dict__["__dict__"].__get__(value)["0"] = X
    assert _names([value], objects=True) == ["0.0"]
    (made,) = tensor_leaves.mapped([value], torch.clone, objects=True)
    assert type(made) is kind
    assert _names([made], objects=True) == ["0.0"]


def test_no_code_of_slots_and_metaclasses_runs():
    kind = _hostile(slots=("z",))
    value = object.__new__(kind)
    kind.__dict__["z"].__set__(value, X)
    assert _names(value, objects=True) == ["z"]
    meta = type("Meta", (type,), {"__getattribute__": _refuses, "__instancecheck__": _refuses, "mro": type.mro})
    own = type.__call__(meta, "Own", (), {})
    value = object.__new__(own)
    object.__setattr__(value, "a", X)
    assert _names(value, objects=True) == ["a"]


def test_a_dictionary_that_is_code_is_left_alone():
    class Proxy:
        __dict__ = property(_refuses)

    assert _names(Proxy(), objects=True) == []


def test_the_end_of_a_copy_would_be_noticed():
    class Ends:
        def __init__(self):
            self.x = X

        def __del__(self):
            ended.append(self)

    ended: list[object] = []
    value = Ends()
    assert tensor_leaves.mapped(value, torch.clone, objects=True) is value
    assert ended == []


def test_a_circle_ends():
    one, two = Plain(X, None), Plain(None, Y)
    one.y, two.x = two, one
    assert _names(one, objects=True) == ["x", "y.y"]
    again: list[object] = [X]
    again.append(again)
    assert _names(again) == ["0"]
    assert tensor_leaves.mapped(again, torch.clone)[1] is again


def test_what_is_long_is_read_in_part_and_copied_whole():
    long = [*range(5000), X]
    assert _names(long) == []
    assert tensor_leaves.mapped(long, torch.clone)[:5000] == long[:5000]
    assert len(_names([[X] * 3 for _ in range(500)])) == 64


def test_a_copy_does_not_share_what_a_forward_pass_may_write_to():
    value = Graph(X, Y)
    copy = tensor_leaves.mapped(value, lambda x: x, objects=True)
    copy.__dict__["_store"].__dict__["_mapping"]["x"] = Y
    assert dict(tensor_leaves.tensors(value, objects=True))["x"] is X
    config = Plain(1, "text")
    assert tensor_leaves.mapped(config, torch.clone, objects=True) is config


def _containers(inner):
    several = st.lists(inner, max_size=4)
    pairs = st.tuples(inner, inner)
    return st.one_of(
        several,
        several.map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        *(pairs.map(lambda p, kind=kind: kind(*p)) for kind in (Record, Slotted, Pair, Plain, Graph)),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(Encoding),
    )


@given(st.recursive(st.one_of(st.none(), st.integers(), st.builds(lambda: torch.ones(1))), _containers, max_leaves=12))
def test_a_nest_made_again_holds_its_tensors_under_the_same_names(value):
    before = list(tensor_leaves.tensors(value, objects=True))
    made = tensor_leaves.mapped(value, torch.clone, objects=True)
    after = list(tensor_leaves.tensors(made, objects=True))
    assert [name for name, _ in after] == [name for name, _ in before]
    assert all(a is not b and torch.equal(a, b) for (_, a), (_, b) in zip(after, before, strict=True))
    assert [x for _, x in tensor_leaves.tensors(value, objects=True)] == [x for _, x in before]
