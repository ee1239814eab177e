"""The dispatch mode behind ``record --ops``: what it lists of a few ops, and that it changes nothing."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from precdoctor.recording.deepscan import op_table
from precdoctor.recording.deepscan.op_list import OpMode
from precdoctor.recording.deepscan.op_table import print_of, sketch_of
from precdoctor.recording.deepscan.targets import Targets
from tests.support.op_lists import sketch_of as by_definition


def listed(work) -> list[dict]:
    """Rows of an op list."""
    mode = OpMode(Targets(), redact=False)
    with mode:
        work()
    if mode.failure is not None:
        raise mode.failure
    columns = mode.table.columns
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def ops(rows) -> list[str]:
    return [name for _, name in sorted({(r["index"], r["op"]) for r in rows})]


def test_ops_have_lines_settings_and_producers():
    x = torch.ones(3, 4)

    def work():
        y = x.mul(2.0)
        return (y + 1).sum(-1, keepdim=True)

    rows = listed(work)
    assert ops(rows) == ["aten.mul.Tensor", "aten.add.Tensor", "aten.sum.dim_IntList"]
    assert [r["producer"] for r in rows if r["side"] == "in"] == [None, 0, 1]
    assert rows[0]["settings"] == '{"other": 2.0}' and rows[0]["file"].endswith("test_op_mode.py")
    assert rows[0]["code"] == "y = x.mul(2.0)" and rows[0]["argument"] == "self"
    assert (rows[1]["side"], rows[1]["amax"], rows[1]["sum"], rows[1]["sum_sq"]) == ("out", 2.0, 24.0, 48.0)


def test_views_and_memory_without_values_are_no_ops_and_hand_on_who_wrote_it():
    def work():
        x = torch.empty(4, 4)
        x.fill_(1.0)
        y = x.t().reshape(16)[2:].view(7, 2)
        torch.neg(y)

    rows = listed(work)
    assert ops(rows) == ["aten.fill_.Scalar", "aten.clone.default", "aten.neg.default"]
    assert [(r["op"], r["producer"]) for r in rows if r["side"] == "in"] == [
        ("aten.clone.default", 0),
        ("aten.neg.default", 1),
    ]


def test_what_an_op_writes_in_place_is_read_before_and_made_after():
    x, out = torch.ones(4), torch.zeros(4)

    def work():
        x.add_(1)
        torch.mul(x, 3.0, out=out)
        torch._foreach_mul_([x, out], 2.0)

    rows = listed(work)
    got = [(r["op"].split(".")[1], r["side"], r["amax"]) for r in rows]
    assert got == [
        ("add_", "in", 1.0), ("add_", "out", 2.0),
        ("mul", "in", 2.0), ("mul", "out", 6.0),
        ("_foreach_mul_", "in", 2.0), ("_foreach_mul_", "in", 6.0),
        ("_foreach_mul_", "out", 4.0), ("_foreach_mul_", "out", 12.0),
    ]  # fmt: skip


def test_memory_that_was_given_back_has_no_writer():
    def work():
        for _ in range(3):
            torch.ones(1000).mul(2)  # the next ones come to lie where these were

    rows = listed(work)
    assert [r["producer"] for r in rows if r["side"] == "in"] == [0, 2, 4]


def test_backward_ops_belong_to_the_line_and_random_numbers_stay_what_they_are():
    weight = torch.randn(8, 8, requires_grad=True)

    def work():
        torch.manual_seed(1)
        weight.grad = None
        F.dropout(torch.tanh(weight @ weight), 0.5).sum().backward()
        return weight.grad.clone()

    plain = work()
    rows = listed(work)
    assert torch.equal(work(), plain)
    backward = [r for r in rows if r["phase"] == "backward"]
    assert {r["op"] for r in backward} >= {"aten.mm.default", "aten.tanh_backward.default"}
    assert len({r["line"] for r in backward}) == 1
    [last] = [r for r in rows if r["op"] == "aten.clone.default"][-1:]
    assert last["fingerprint"] == print_of(plain).fingerprint


def test_what_fails_ends_the_list_and_not_the_op(monkeypatch):
    monkeypatch.setattr(op_table, "print_of", lambda _x: 1 / 0)
    mode = OpMode(Targets(), redact=False)
    with mode:
        assert float(torch.ones(3).sum() * 2) == 6.0
    assert isinstance(mode.failure, ZeroDivisionError)


def test_a_list_has_an_end(monkeypatch):
    monkeypatch.setattr(op_table, "MAX_OPS", 5)
    mode = OpMode(Targets(), redact=False)
    with mode:
        x = torch.ones(3)
        for _ in range(20):
            x = x + 1
    assert float(x[0]) == 21.0 and mode.table.full and mode.failure is None
    assert len(ops([{"index": i, "op": ""} for i in mode.table.columns["index"]])) <= 5


# --- what is kept of a tensor -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_a_print_tells_values_apart_and_views_do_not_count(dtype):
    torch.manual_seed(0)
    x = torch.randn(6, 10).to(dtype)
    found = print_of(x)
    assert found == print_of(x.clone()) == print_of(torch.stack((x.float(), x.float()))[1].to(dtype))
    y = x.clone().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    y[3, 4] ^= 1
    other = print_of(y.view(dtype))
    assert other.fingerprint != found.fingerprint
    assert print_of(x.t().contiguous()).fingerprint != found.fingerprint
    assert found.sum_sq == pytest.approx(float((x.double() ** 2).sum()))


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (16384,), (16385,), (70, 16384), (1100000,)])
def test_a_sketch_is_what_its_definition_says_whatever_the_strides(shape):
    x = torch.randn(shape)
    expected = by_definition(x.numpy())
    assert sketch_of(x) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    if len(shape) > 1:
        assert sketch_of(x.t().contiguous().t()) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_non_finite_elements_are_counted_and_left_out():
    x = torch.tensor([1.0, math.nan, math.inf, -math.inf, -3.0])
    found = print_of(x)
    assert (found.nan, found.pos_inf, found.neg_inf, found.amax, found.sum) == (1, 1, 1, 3.0, -2.0)
    assert found.sketch == sketch_of(torch.tensor([1.0, 0.0, 0.0, 0.0, -3.0]))
    assert print_of(torch.full((2,), math.nan)).amax is None


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool])
def test_of_integers_the_bits_count(dtype):
    x = torch.tensor([1, 0, 1]).to(dtype)
    found, other = print_of(x), print_of(x.flip(0).roll(1))
    assert found.fingerprint is not None and found.amax is None and found.sketch is None
    assert found == print_of(x.clone()) and found.fingerprint != other.fingerprint


def test_what_has_no_memory_has_no_fingerprint():
    assert print_of(torch.empty(3, device="meta")).fingerprint is None
    assert print_of(torch.empty(0)).fingerprint is None
    assert print_of(torch.view_as_complex(torch.ones(3, 2))).sum_sq == 6.0
