"""Two lists of ops: what is whose counterpart, what differs first beyond its format, what follows from it."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from precdoctor.comparison.op_alignment import align
from precdoctor.comparison.op_compare import branches
from precdoctor.comparison.op_differences import compare_lists
from tests.support.op_lists import LAYERS, Program, network

CHAINS = st.lists(st.integers(0, len(LAYERS) - 1), min_size=2, max_size=8)
CASTS = st.frozensets(st.integers(0, 7), max_size=4)


@given(CHAINS, CASTS, CASTS)
@settings(max_examples=60, deadline=None)
def test_every_op_is_in_the_alignment_once_and_pairs_are_alike(layers, casts_a, casts_b):
    a, b = network(layers, casts_a).ops, network(layers, casts_b).ops
    slots = align(a, b)
    assert [i for i, _ in slots if i is not None] == list(range(len(a)))
    assert [j for _, j in slots if j is not None] == list(range(len(b)))
    pairs = [(a[i], b[j]) for i, j in slots if i is not None and j is not None]
    assert all(x.name == y.name and x.line == y.line for x, y in pairs if not x.name.startswith("aten._to_copy"))
    assert sum(not x.name.startswith("aten._to_copy") for x, _ in pairs) == len(layers) + 1


@given(CHAINS, CASTS, CASTS, st.data())
@settings(max_examples=60, deadline=None)
def test_casts_on_either_side_do_not_move_the_first_op_that_is_wrong(layers, casts_a, casts_b, data):
    fault = data.draw(st.integers(0, len(layers) - 1))
    found = compare_lists(network(layers, casts_a).ops, network(layers, casts_b, fault).ops)
    assert found.beyond is not None
    assert (found.beyond.op.line, found.beyond.op.name) == (fault + 1, f"aten.{LAYERS[layers[fault]][0]}")


@given(CHAINS, CASTS)
@settings(max_examples=60, deadline=None)
def test_casts_alone_are_explained_by_their_format(layers, casts):
    found = compare_lists(network(layers).ops, network(layers, casts).ops)
    assert found.beyond is None
    assert (found.first is None) == (not any(c < len(layers) for c in casts))


@given(CHAINS, CASTS)
@settings(max_examples=20, deadline=None)
def test_equal_lists_differ_in_nothing(layers, casts):
    found = compare_lists(network(layers, casts).ops, network(layers, casts).ops)
    assert (found.differences, found.given, found.paired) == ((), (), found.ops_a)


def test_an_edit_above_moves_lines_and_no_counterparts():
    layers = [0, 1, 2, 3]
    a, b = network(layers).ops, network(layers).ops
    moved = [op.__class__(**{**vars(op), "line": op.line + 7, "code": None}) for op in b]
    assert all(i is not None and j is not None for i, j in align(a, moved))


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, 1.0, shape).astype(np.float32)


def test_an_op_order_that_changed_is_found_where_it_changed():
    def program(swapped: bool) -> Program:
        made = Program()
        a, b, c = (made.run("mul.Tensor", lambda x: x * 2, normal(n, 8, 8), line=1) for n in range(3))
        first = (b, c) if swapped else (a, b)
        half = made.run("add.Tensor", np.add, *first, line=2)
        whole = made.run("add.Tensor", np.add, *((a, half) if swapped else (half, c)), line=2)
        made.run("tanh.default", np.tanh, whole, line=3)
        return made

    found = compare_lists(program(swapped=False).ops, program(swapped=True).ops)
    assert found.beyond is found.first is not None
    assert (found.first.op.line, found.first.reads_others) == (2, True)
    assert all(d.explained for d in found.differences if d.op.line == 3)


def decomposed(fused: bool, eps: float = 1e-5) -> Program:
    made = Program()
    x = made.run("mul.Tensor", lambda v: v * 3, normal(0, 8, 32), line=1)
    if fused:
        work = lambda v: v / np.sqrt((v * v).mean(-1, keepdims=True) + np.float32(eps))  # noqa: E731
        x = made.run("_fused_rms_norm.default", work, x, line=2)
    else:
        square = made.run("pow.Tensor_Scalar", lambda v: v * v, x, line=2)
        mean = made.run("mean.dim", lambda v: v.mean(-1, keepdims=True), square, line=2)
        root = made.run("rsqrt.default", lambda v: 1 / np.sqrt(v + np.float32(eps)), mean, line=2)
        x = made.run("mul.Tensor", np.multiply, x, root, line=2)
    made.run("tanh.default", np.tanh, x, line=3)
    return made


def test_a_decomposition_is_compared_by_what_comes_out_of_it():
    found = compare_lists(decomposed(fused=False).ops, decomposed(fused=True).ops)
    assert found.beyond is None and found.paired == 2
    assert found.first is None or found.first.error < 1e-6
    wrong = compare_lists(decomposed(fused=False).ops, decomposed(fused=True, eps=1.0).ops)
    assert wrong.beyond is not None
    assert (wrong.beyond.op.line, wrong.beyond.b.name) == (2, "aten._fused_rms_norm.default")


def test_an_op_that_is_missing_is_told_before_what_it_changes():
    def program(scaled: bool) -> Program:
        made = Program()
        x = made.run("mul.Tensor", lambda v: v * 2, normal(0, 8, 8), line=1)
        if scaled:
            x = made.run("div.Tensor", lambda v: v / 8, x, line=2)
        made.run("tanh.default", np.tanh, x, line=3)
        return made

    found = compare_lists(program(scaled=True).ops, program(scaled=False).ops)
    assert found.beyond is not None
    assert (found.beyond.op.name, found.beyond.b) == ("aten.div.Tensor", None)


def test_what_differs_before_the_step_is_no_fault_of_an_op():
    def program(weight: np.ndarray) -> Program:
        made = Program()
        made.run("mul.Tensor", np.multiply, normal(0, 8, 8), weight, line=1)
        return made

    found = compare_lists(program(normal(1, 8, 8)).ops, program(normal(1, 8, 8) + np.float32(1e-3)).ops)
    assert len(found.given) == 1 and found.beyond is None
    assert 1e-4 < found.given[0].error < 1e-2


def test_the_tree_holds_all_that_reads_what_is_wrong_and_nothing_else():
    def program(fault: bool) -> Program:
        made = Program()
        x = made.run("mul.Tensor", lambda v: v * (2.5 if fault else 2), normal(0, 8, 8).astype(np.float64), line=1)
        y = made.run("mul.Tensor", lambda v: v * 2, normal(1, 8, 8).astype(np.float64), line=2)
        made.module = "branch"
        made.run("exp.default", np.exp, x, line=3)
        made.run("exp.default", np.exp, y, line=4)
        made.module = "trunk"
        for line in (5, 6, 7):
            x = made.run("tanh.default", np.tanh, x, line=line)
        return made

    found = compare_lists(program(fault=False).ops, program(fault=True).ops)
    assert found.origin is not None and found.origin.op.line == 1
    tree = branches(found)
    assert [(b.depth, [d.op.line for d in b.ops]) for b in tree] == [(1, [3]), (0, [5, 6, 7])]
    assert tree[1].growth == tree[1].end.error / found.origin.error
