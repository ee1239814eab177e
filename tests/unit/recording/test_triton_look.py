"""The look at gradients on a GPU, in one launch; by Triton's interpreter where there is no GPU."""

from __future__ import annotations

import math

import pytest
import torch

from precdoctor.recording.kernels import native_cpu
from precdoctor.recording.steps import sentinel

with pytest.MonkeyPatch.context() as _patch:
    if not torch.cuda.is_available():
        _patch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton")
    triton_look = pytest.importorskip("precdoctor.recording.kernels.triton_look")
    from precdoctor.recording.kernels.device_look import DeviceLook

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]
DEVICE = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
ADDRESS = torch._C.TensorBase.data_ptr


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def looked(tensors, look=None):
    """L2 norm and amax by the kernel."""
    tensors = [x.to(DEVICE) if x.is_contiguous() else x for x in tensors]
    look = look or DeviceLook(tensors)
    stream = torch.cuda.current_stream().cuda_stream if DEVICE.type == "cuda" else 0
    found = look.look(list(map(ADDRESS, tensors)), stream)
    assert found is not None and found.shape[1] == 2
    norm, amax = sentinel._arriving(found)
    return norm(), amax()


def truth(tensors):
    amax, squares = 0.0, 0.0
    for x in tensors:
        wide = x.double().flatten()
        amax = math.nan if math.isnan(amax) else max(amax, float(wide.abs().max()))
        amax = math.nan if wide.isnan().any() else amax
        squares += float(wide.square().sum())
    return math.sqrt(squares), amax


def tensors(*dtypes):
    torch.manual_seed(0)
    shapes = [(7,), (), (64, 48), (130,), (2, 3, 3), (40, 96), (3001,), (1, 16)]
    return [torch.randn(shape).mul(2.0**i).to(dtypes[i % len(dtypes)]) for i, shape in enumerate(shapes * 2)]


DTYPES = [(torch.float32,), (torch.bfloat16,), (torch.float16, torch.float32, torch.bfloat16)]


@pytest.mark.parametrize("dtypes", DTYPES)
def test_norm_and_amax_are_those_of_all_tensors(dtypes):
    given = tensors(*dtypes)
    assert DEVICE.type == "cpu" or DeviceLook.fits([x.to(DEVICE) for x in given])
    norm, amax = looked(given)
    wanted = truth(given)
    assert amax == wanted[1]
    assert norm == pytest.approx(wanted[0], rel=1e-6)


@pytest.mark.parametrize("scale", [2.0**-149, 2.0**-126, 2.0**-60, 2.0**60, 2.0**120])
def test_no_square_leaves_the_range(scale):
    given = [torch.arange(1.0, 131.0).mul(scale), torch.full((33,), scale), torch.zeros(5)]
    norm, amax = looked(given)
    assert amax == truth(given)[1]
    assert norm == pytest.approx(truth(given)[0], rel=1e-6)


def test_large_and_tiny_elements_lie_side_by_side():
    given = [torch.tensor([2.0**100, 1.0, 2.0**-100, -(2.0**99)]), torch.tensor([2.0**-140] * 9)]
    assert looked(given)[0] == pytest.approx(truth(given)[0], rel=1e-6)
    small = [torch.tensor([2.0**-45] * 1000 + [0.0])]
    assert looked(small)[0] == pytest.approx(2.0**-45 * math.sqrt(1000), rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 1535, 2999, 3000])
def test_amax_is_finite_exactly_if_every_element_is(bad, where):
    x = torch.ones(3001)
    x[where] = bad
    norm, amax = looked([torch.ones(4), x])
    assert not math.isfinite(amax) and not math.isfinite(norm)
    assert math.isnan(amax) == math.isnan(bad)


def test_elements_behind_a_tensor_are_not_read():
    store = torch.full((4096,), math.nan)
    given = [store[: n + 16 : 1][16:] for n in (1, 5, 130, 513)]
    for x in given:
        x.fill_(0.0)
    store[16 + 513 :] = math.nan
    store[16 : 16 + 513] = 2.0
    assert looked([store[16 : 16 + 513]]) == (pytest.approx(2.0 * math.sqrt(513)), 2.0)


def test_addresses_that_are_no_multiples_of_16_will_do():
    store = torch.randn(5000).to(DEVICE)
    given = [store[1:4000], store[4001:4003]]
    assert looked(given)[0] == pytest.approx(truth([x.cpu() for x in given])[0], rel=1e-6)


def test_the_same_look_follows_tensors_that_have_moved_and_gives_the_same_bits():
    given = [x.to(DEVICE) for x in tensors(torch.float32)]
    look = DeviceLook(given)
    first = looked(given, look)
    assert looked([x.clone() for x in given], look) == first
    assert looked([x * 2 for x in given], look)[1] == 2 * first[1]


def test_it_agrees_with_the_look_of_the_cpu():
    given = tensors(torch.float32, torch.bfloat16)
    found = native_cpu.look(given)
    if found is None:
        pytest.skip("the C kernel is not built")
    norm, amax = looked(given)
    assert amax == found[0] and norm == pytest.approx(math.sqrt(found[1]), rel=1e-6)
