"""The tensors in what modules take and return."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict
from typing import NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from precdoctor.recording.kernels import native_cpu
from precdoctor.recording.model import tensor_leaves
from precdoctor.recording.ops.dispatched_ops import storage_key


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    states: tuple
    loss: torch.Tensor | None = None


class Pair(NamedTuple):
    left: object
    right: object


X = torch.ones(2)


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (X, [""]),
        ((X, (X, X)), ["0", "1.0", "1.1"]),
        ([X, None, 3, "text", {"a": X}], ["0", "4.a"]),
        (OrderedDict(logits=X, hidden_states=(X, X)), ["logits", "hidden_states.0", "hidden_states.1"]),
        (UserDict(a=X), ["a"]),
        (Output(X, (X,)), ["logits", "states.0"]),
        (Pair(X, [X]), ["left", "right.0"]),
        ({"a": {"b": {"c": {"d": X}}}}, []),  # too deep
        (Output, []),
        (None, []),
    ],
)
def test_names_of_leaves(value, names):
    assert [name for name, _ in tensor_leaves.tensors(value)] == names


def test_memory_that_was_given_back_is_not_read():
    gathered = torch.nn.Parameter(torch.ones(2, 3))
    assert tensor_leaves.plain(gathered) is gathered
    gathered.untyped_storage().resize_(0)  # as FSDP does
    assert tensor_leaves.plain(gathered) is None


def test_zero_tangents_have_no_memory_to_read():
    zero = torch._efficientzerotensor((2, 3))
    assert tensor_leaves.plain(zero) is None
    assert native_cpu.look([zero]) is None


def test_batched_gradients_have_no_memory_to_read():
    seen = []
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append((tensor_leaves.plain(grad), storage_key(grad))))
    torch.autograd.grad(y**2, x, torch.eye(3), is_grads_batched=True)
    assert seen == [(None, None)]


def test_a_cache_is_cut_off():
    assert len(list(tensor_leaves.tensors([X] * 1000))) == 64


def test_only_numbers_that_can_be_read():
    values = {"f": X, "i": torch.ones(2, dtype=torch.int64), "c": torch.ones(2, dtype=torch.complex64), "b": X > 0}
    assert [name for name, _ in tensor_leaves.floating(values)] == ["f", "c"]
    seen = []
    torch.func.vmap(lambda x: (seen.extend(tensor_leaves.floating(x)), x)[1])(torch.ones(3, 2))
    assert seen == []


def test_a_lazy_parameter_has_no_values_yet():
    lazy = torch.nn.LazyLinear(2).weight
    assert tensor_leaves.version(lazy) == -1
    assert tensor_leaves.plain(lazy) is None


def test_plain_tensors():
    assert tensor_leaves.plain(X) is X
    assert tensor_leaves.plain(torch.nn.Parameter(X)).shape == (2,)
    assert tensor_leaves.plain(torch.ones(0)) is None
    assert tensor_leaves.plain(torch.ones(2, device="meta")) is None
    assert tensor_leaves.plain(torch.ones(2, dtype=torch.int32)) is None
    assert tensor_leaves.plain(torch.tensor([1 + 2j])).tolist() == [[1.0, 2.0]]
    with FakeTensorMode():
        assert tensor_leaves.plain(torch.ones(2)) is None
    nested = torch.nested.nested_tensor([X, torch.ones(3)], layout=torch.jagged)
    assert tensor_leaves.plain(nested) is None
    sparse = torch.sparse_coo_tensor([[0, 0, 1]], [1.0, 2.0, 4.0], (3,), check_invariants=False)
    assert sorted(tensor_leaves.plain(sparse).tolist()) == [3.0, 4.0]


def test_low_precision_types_are_numbers():
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float64):
        assert tensor_leaves.plain(torch.ones(2).to(dtype)) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("shape", [(7,), (3, 5), (3, 5, 2)])
def test_values_of_one_place_are_added_up_without_coalesce(shape, dtype, monkeypatch):
    count, places = 40, min(2, len(shape))
    indices = torch.stack([torch.randint(size, (count,)) for size in shape[:places]])
    x = torch.sparse_coo_tensor(indices, torch.randn(count, *shape[places:], dtype=dtype), shape, check_invariants=True)
    expected = x.coalesce().values()
    monkeypatch.setattr(torch.Tensor, "coalesce", None)  # some versions of torch warn in it, and a warning may raise
    found = tensor_leaves.plain(x)
    expected = torch.view_as_real(expected) if dtype.is_complex else expected
    assert torch.allclose(found.float(), expected.float(), rtol=0.02, atol=0.05 if dtype is torch.bfloat16 else 1e-5)
