from __future__ import annotations

import numpy as np
import pytest

from precdoctor.diagnosis.offline.whatif.native import not_native
from precdoctor.diagnosis.offline.whatif.plan import EARLY_STEPS, make_plan
from precdoctor.diagnosis.offline.whatif.recipe import ask
from precdoctor.diagnosis.offline.whatif.target import Target
from precdoctor.diagnosis.offline.whatif.trend import Trends
from precdoctor.errors import UsageError
from precdoctor.runlog import open_run
from tests.support.runs import write_run
from tests.support.tensors import row_of

RNG = np.random.default_rng(0)
NORMAL = RNG.standard_normal((16, 64))
#: Too wide for one E4M3 scale, not for one per block; and too wide for either.
BY_BLOCK = NORMAL * np.where(np.arange(64) < 32, 1.0, 2.0**-40)
EVERYWHERE = NORMAL * np.where(np.arange(64) % 2, 1.0, 2.0**-40)


def linear(module, step=0, order=10, *, x=NORMAL, w=NORMAL, g=NORMAL, own_input=True, kind="Linear"):
    """The rows of one module; ``own_input`` as for a tensor that functional code made."""
    rows = [("weight", "weight", w, None), ("output", "", NORMAL, order), ("grad_output", "", g, 1000 - order)]
    rows += [("input", "0", x, order - 1)] if own_input else []
    return [row_of(v, step=step, module=module, module_class=kind, kind=k, name=n, order=o) for k, n, v, o in rows]


def plan_of(tmp_path, rows, facts=None, **options):
    run = open_run(write_run(tmp_path / "run", rows, [{"step": 0}], facts=facts or {}))
    plan = make_plan(run, options.pop("target", Target()), **options)
    return plan, {m.module: m for m in plan.modules}


LAST = linear("head", order=99)


def test_each_module_gets_the_narrowest_precision_that_holds(tmp_path):
    rows = [
        *linear("easy"),
        *linear("blocks", order=20, x=BY_BLOCK),
        *linear("wide", order=30, g=EVERYWHERE * 2.0**-60),
        *LAST,
    ]
    plan, modules = plan_of(tmp_path, rows)
    assert [m.module for m in plan.modules] == ["easy", "blocks", "wide", "head"]
    assert {name: m.precision for name, m in modules.items()} == {
        "easy": "fp8", "blocks": "mxfp8", "wide": "bf16", "head": "wide",
    }  # fmt: skip
    assert modules["easy"].reason == ""
    assert modules["blocks"].reason == "input in E4M3FN at step 0: 50 % flushed"
    assert modules["wide"].reason.startswith("grad_output in MXFP8_E4M3 at step 0: 5")
    assert [(o.role, o.recipe.name) for o in modules["easy"].operands] == [
        ("weight", "E4M3FN"), ("input", "E4M3FN"), ("grad_output", "E5M2"),
    ]  # fmt: skip
    assert {r.name for r in plan.recipes} == {"E4M3FN", "E5M2", "MXFP8_E4M3", "BF16"}


def test_some_stay_wide_whatever_their_numbers(tmp_path):
    rows = [
        *linear("token", kind="Embedding"),
        *linear("moe.router", order=20),
        *linear("mlp.gate_proj", order=30),
        *LAST,
    ]
    _, modules = plan_of(tmp_path, rows)
    assert {name: m.reason.partition(":")[0] for name, m in modules.items() if m.precision == "wide"} == {
        "token": "embedding", "moe.router": "router", "head": "final logits",
    }  # fmt: skip
    assert modules["mlp.gate_proj"].precision == "fp8"


def test_a_module_around_others_stays_wide_for_they_would_be_given_what_is_cast_for_it(tmp_path):
    rows = [*linear("q.base", order=10), *linear("q", order=11), *linear("attn", order=12), *LAST]
    rows += [r for r in linear("attn.out", order=13) if r["kind"] == "weight"]  # never called: attention reads it
    _, modules = plan_of(tmp_path, rows)
    assert modules["q"].reason.startswith("around other modules") and modules["q.base"].precision == "fp8"
    assert modules["attn"].precision == "fp8"


def test_a_head_tied_to_the_embedding_is_planned_under_its_own_name(tmp_path):
    head = [r for r in linear("head", order=99) if r["kind"] != "weight"]
    parameter = {"name": "weight", "module": "token", "shape": list(NORMAL.shape), "tied": ["head.weight"]}
    facts = {"roots": [{"name": "GPT#0", "parameters": [parameter]}]}
    rows = [{**r, "root": "GPT#0"} for r in (*linear("token", order=5, kind="Embedding"), *linear("last"), *head)]
    plan, modules = plan_of(tmp_path, rows, facts)
    assert [m.module for m in plan.modules] == ["token", "last", "head"]
    assert modules["head"].reason.startswith("final logits") and modules["head"].module_class == "Linear"
    assert modules["last"].precision == "fp8" and modules["token"].reason.startswith("embedding")


def test_an_input_is_found_by_execution_order_and_width(tmp_path):
    norm = row_of(NORMAL, module="norm", kind="output", order=5)
    narrow = row_of(NORMAL[:, :32], module="mask", kind="output", order=9)
    rows = [norm, narrow, *linear("q", order=10, own_input=False), *linear("k", order=11, own_input=False), *LAST]
    _, modules = plan_of(tmp_path, rows)
    for name in ("q", "k"):  # k is not fed by q, which ran just before it
        assert {o.role: o.source for o in modules[name].operands}["input"] == "norm output"
    _, modules = plan_of(tmp_path / "none", [*linear("q", order=1, own_input=False), *LAST])
    assert modules["q"].precision == "wide" and modules["q"].reason.startswith("input: not recorded")


def test_a_gradient_of_zeros_says_nothing(tmp_path):
    _, modules = plan_of(tmp_path, [*linear("a", g=NORMAL * 0.0), *LAST])
    assert modules["a"].precision == "wide" and "not zero at any step" in modules["a"].reason


def test_outliers_are_extrapolated_from_their_trend(tmp_path):
    def spiked(step):
        x = NORMAL * 2.0**-2
        x[0, 0] = 2.0 ** (2 + step / 2)
        return x

    rows = [r for s in range(12) for r in [*linear("a", s, x=spiked(s)), *linear("head", s, order=99)]]
    near, modules = plan_of(tmp_path, rows, horizon=11)
    assert near.horizon == 11 and modules["a"].precision == "fp8"
    assert {o.role: o.growth for o in modules["a"].operands} == {"weight": 0.0, "input": 0.0, "grad_output": 0.0}
    far, modules = plan_of(tmp_path / "far", rows, horizon=60)
    assert modules["a"].precision == "mxfp8" and "once amax has grown by" in modules["a"].reason
    default, _ = plan_of(tmp_path / "default", rows)
    assert default.horizon == 23 and far.steps == tuple(range(12))


def test_what_it_rests_on(tmp_path):
    early, _ = plan_of(tmp_path, [*linear("a"), *LAST])
    assert len(early.warnings) == 1 and "outliers emerge late" in early.warnings[0]
    late = [r for s in range(8) for r in [*linear("a", EARLY_STEPS + s), *linear("head", EARLY_STEPS + s, order=99)]]
    assert plan_of(tmp_path / "late", late)[0].warnings == ()
    assert "rare outliers" in plan_of(tmp_path / "few", late[:10])[0].warnings[0]


@pytest.mark.parametrize(("facts", "before"), [({}, 4), ({"autocast": ["cuda:bfloat16"]}, 2)])
def test_memory(tmp_path, facts, before):
    plan, _ = plan_of(tmp_path, [*linear("a"), *LAST, *linear("t", order=3, kind="Embedding")], facts)
    n = NORMAL.size  # "a" goes to one byte, the head stays, an embedding is looked up and not multiplied
    assert plan.memory.weights == plan.memory.inputs == (2 * n * before, n + n * before)


def test_mistakes(tmp_path):
    for options, words in (({"module": "b"}, "no module matching 'b'"), ({"horizon": -1}, "--horizon -1 lies before")):
        with pytest.raises(UsageError, match=words):
            plan_of(tmp_path / words[:5], [*linear("a"), *LAST], **options)


@pytest.mark.parametrize("parts", [1, 5])
def test_trends_are_least_squares_in_any_order(parts):
    rng = np.random.default_rng(3)
    steps, amax, rms = rng.integers(0, 500, 40), np.exp(rng.standard_normal(40)), np.exp(rng.standard_normal(40))
    trends = Trends()
    trends.grow(3)
    for some in np.array_split(rng.permutation(40), parts):
        trends.add(np.full(some.size, 1), steps[some], amax[some], rms[some])
    trends.add(np.array([1, 1, 2]), np.array([3, 4, 5]), np.array([0.0, np.nan, 1.0]), np.ones(3))
    expected = np.polyfit(steps, np.log2(amax), 1)[0], np.polyfit(steps, np.log2(amax / rms), 1)[0]
    assert trends.slopes(1) == pytest.approx(expected)
    assert trends.slopes(0) == trends.slopes(2) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ({"type": "cuda", "capability": [8, 0]}, "E4M3FN (needs 8.9) and MXFP8_E4M3 (needs 10.0)"),
        ({"type": "cuda", "capability": [7, 5]}, "BF16 (needs 8.0), E4M3FN (needs 8.9) and MXFP8_E4M3 (needs 10.0)"),
        ({"type": "cuda", "capability": [9, 0]}, "MXFP8_E4M3 (needs 10.0)"),
        ({"type": "cuda", "capability": [10, 0]}, None),
        ({"type": "cpu", "capability": "AVX512"}, "E4M3FN and MXFP8_E4M3"),
        (None, None),
        ({"type": "mps"}, None),
    ],
)
def test_formats_a_device_does_not_compute_in(device, expected):
    sentence = not_native([ask(name) for name in ("bf16", "e4m3", "mxfp8", "fp32")], device)
    assert (sentence is None) if expected is None else (expected in sentence)
