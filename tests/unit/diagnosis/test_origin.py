"""Producer or propagator: the walk through one step."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precdoctor.diagnosis.analyses.origin import Sighting, caller_of, is_loss_module, suspicious
from precdoctor.diagnosis.survey.rows import TensorRow
from tests.support.training import CLASSES, ROOT, find, healthy_step, poison, spoil

TREE = {(ROOT, name): kind for name, kind in CLASSES.items()}


def typed(rows: list[dict]) -> list[TensorRow]:
    return [TensorRow.of({"rank": 0, "call": 0, "name": "", "subnormal": 0, "at_max": 0, **r}) for r in rows]


@pytest.mark.parametrize(
    ("module", "previous", "caller"),
    [
        ("blocks.0.attn.proj", "blocks.0.attn.qkv", "blocks.0.attn"),
        ("blocks.0.mlp.up", "blocks.0.attn.proj", "blocks.0"),
        ("blocks.0.norm", "emb", ""),
        ("norm", "blocks.0.mlp.down", ""),
        ("emb", None, ""),
        ("blocks.0.norm", None, "blocks.0"),
    ],
)
def test_whose_code_handed_over_the_input(module: str, previous: str | None, caller: str) -> None:
    row = next(r for r in typed(healthy_step(0)) if r.module == (previous or "emb"))
    before = dataclasses.replace(row, kind="output") if previous is not None else None
    assert caller_of(ROOT, module, before, TREE) == caller


def test_containers_hand_over_nothing_themselves() -> None:
    assert CLASSES["blocks"] == "ModuleList"
    assert caller_of(ROOT, "blocks.0", None, TREE) == ""


@pytest.mark.parametrize(
    ("root", "module", "kind", "loss"),
    [
        ("CrossEntropyLoss#0", "", "", True),
        ("GPT#0", "criterion", "BCEWithLogitsLoss", True),
        ("GPT#0", "", "GPT", False),
        ("Lossy#0", "", "", False),
        ("GPT#0", "head", "", False),
    ],
)
def test_loss_modules(root: str, module: str, kind: str, loss: bool) -> None:
    assert is_loss_module(root, module, kind) is loss


@given(
    st.sampled_from(["emb", "blocks.0.norm", "blocks.0.mlp.up", "blocks.0.mlp.down", "head"]),
    st.sets(st.sampled_from(["blocks.0.attn.qkv", "norm"])),
    st.randoms(use_true_random=False),
)
@settings(max_examples=40, deadline=None)
def test_the_origin_is_found_in_any_order_of_rows_and_among_masks(
    origin: str, masks: set[str], rng: random.Random
) -> None:
    step = healthy_step(5)
    poison(step, "output", origin, nan=3)
    for module in masks - {origin}:
        row = find(step, "output", module)
        row.update(nan=0, pos_inf=0)
        spoil(row, neg_inf=50)
    rows = typed(step)
    reference = {
        r.key: (Sighting(4, frozenset({"neg_inf"}), 0.1, 1.0, 10.0),)
        for r in rows
        if r.module in masks and r.kind == "output"
    }
    rng.shuffle(rows)
    row, seen = suspicious(rows, reference, loss_is_finite=False)
    assert row is not None
    assert (row.kind, row.module) == ("output", origin)
    assert all(m.order is not None and row.order is not None and m.order < row.order for m in seen)


def test_a_healthy_step_has_no_origin() -> None:
    assert suspicious(typed(healthy_step(0)), {}, loss_is_finite=True) == (None, ())


def test_headroom_and_rms() -> None:
    row = next(r for r in typed(healthy_step(0, dtype="float16")) if r.kind == "output")
    assert row.headroom == pytest.approx(14.0, abs=0.1)
    assert row.rms == pytest.approx(1.0, abs=0.05)
    assert dataclasses.replace(row, dtype="int8").headroom is None
    assert dataclasses.replace(row, amax=0.0).headroom is None


@pytest.mark.parametrize(
    ("kind", "name", "told"),
    [
        ("opt_state", "weight.exp_avg_sq", "state `exp_avg_sq` of `up.weight`"),
        ("weight", "weight", "`up` weight `weight`"),
        ("grad_output", "", "`up` gradient of the output"),
    ],
)
def test_how_messages_call_a_tensor(kind, name, told):
    common = {"step": 0, "rank": 0, "call": 0, "root": "Net#0", "module": "up", "dtype": "float32", "numel": 4}
    row = TensorRow.of({**common, "subnormal": 0, "at_max": 0, "nan": 1, "pos_inf": 0, "neg_inf": 0, "zero": 0} | {
        "kind": kind, "name": name, "shape": [2, 2], "module_class": "Linear", "order": 1,
    })  # fmt: skip
    assert row.label == told
    assert row.count_words() == "1 NaN of 4 elements"
