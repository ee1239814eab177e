"""Rows against what the scripts saw themselves: each statistic is computed again, by other means, from their arrays."""

from __future__ import annotations

import collections
import math

import ml_dtypes
import numpy as np
import pytest

import precdoctor
from tests.support.processes import record, script, warm

FINFO = {"float32": np.finfo(np.float32), "float64": np.finfo(np.float64), "bfloat16": ml_dtypes.finfo("bfloat16")}
#: Specimen, its model, and whether the script saw every kind by itself.
WATCHED = [("gpt_accumulate", "GPT"), ("cnn", "CNN"), ("pure_bf16", "PureBF16")]


def expected(values: np.ndarray, dtype: str) -> dict[str, object]:
    """The columns of docs/run-log.md, written down naively."""
    finite = values[np.isfinite(values)]
    size = np.abs(finite)
    mantissa, exponent = np.frexp(size[size > 0])
    bins = collections.Counter(np.where(mantissa == 0.5, exponent - 2, exponent - 1).tolist())
    lo = min(bins, default=None)
    return {
        "numel": values.size,
        "nan": int(np.isnan(values).sum()),
        "pos_inf": int(np.isposinf(values).sum()),
        "neg_inf": int(np.isneginf(values).sum()),
        "zero": int((finite == 0).sum()),
        "subnormal": int(((size > 0) & (size < float(FINFO[dtype].smallest_normal))).sum()),
        "at_max": int((size == float(FINFO[dtype].max)).sum()),
        "amax": size.max(),
        "amin_nonzero": size[size > 0].min() if bins else None,
        "exp_lo": lo,
        "exp_hist": [bins[k] for k in range(lo, max(bins) + 1)] if bins else [],
    }


def assert_holds(row, values: np.ndarray, dtype: str) -> None:
    where = f"{row['kind']} {row['module']} {row['name']}"
    assert row["dtype"] == dtype, where
    for column, value in expected(values, dtype).items():
        got = row[column]
        if column == "exp_hist":
            assert list(got) == value, f"{where}: {column}"
        elif value is None:
            assert got is None or math.isnan(got), f"{where}: {column}"
        else:
            assert got == value, f"{where}: {column}"
    # Sums are those of a fast kernel: good to about six digits of what was added up.
    assert row["sum"] == pytest.approx(math.fsum(values), rel=0, abs=1e-6 * math.fsum(np.abs(values))), where
    assert row["sum_sq"] == pytest.approx(math.fsum(values**2), rel=1e-6), where


def of_site(rows, key: str):
    kind, module, name = key.split("|")
    return rows[(rows["kind"] == kind) & (rows["module"] == module) & (rows["name"] == name)]


@pytest.mark.parametrize(("specimen", "model"), WATCHED)
@pytest.mark.parametrize("kind", ["output", "grad_output", "weight", "weight_grad", "weight_grad_step"])
def test_every_statistic_is_that_of_the_true_tensor(zoo, specimen, model, kind):
    step, types, arrays = zoo.oracle(model)
    rows = zoo.rows(specimen, step=step, root=f"{model}#0", kind=kind)
    keys = [key for key in arrays if key.startswith(f"{kind}|")]
    assert len(keys) >= 2
    for key in keys:
        found = of_site(rows, key)
        assert len(found) == 1, key
        assert_holds(found.iloc[0], arrays[key], types[key])
    nested = {"logits", "loss"}  # leaves of a dataclass: the script's own hooks only watch lone tensors
    assert {f"{r.kind}|{r.module}|{r.name}" for r in rows.itertuples() if r.name not in nested} == set(keys)


@pytest.mark.parametrize(("specimen", "model"), WATCHED)
def test_updates_are_the_stored_difference(zoo, specimen, model):
    step, _, arrays = zoo.oracle(model)
    rows = zoo.rows(specimen, step=step, kind="update")
    befores = [key for key in arrays if key.startswith("before|")]
    assert len(rows) == len(befores) > 0
    for key in befores:
        site = key.removeprefix("before|")
        (row,) = of_site(rows, f"update|{site}").to_dict("records")
        stored = (arrays[f"after|{site}"] - arrays[key]).astype(np.float32).astype(np.float64)
        for column, value in expected(stored, "float32").items():
            if column not in ("subnormal", "at_max"):  # by the type of the weight
                assert (list(row[column]) if column == "exp_hist" else row[column]) == value, (key, column)


def test_lost_updates_of_an_fp32_run_are_the_weights_that_stayed(zoo):
    """Nesterov momentum with weight decay means to move every weight that is not zero."""
    step, _, arrays = zoo.oracle("CNN")
    for key in (k for k in arrays if k.startswith("before|")):
        site = key.removeprefix("before|")
        (row,) = of_site(zoo.rows("cnn", step=step, kind="update"), f"update|{site}").to_dict("records")
        assert row["unchanged"] == (arrays[key] == arrays[f"after|{site}"]).sum()
        assert sum(row["rel_hist"]) == (arrays[key] != 0).sum()


def test_pure_bf16_loses_most_updates_and_the_count_is_exact(zoo):
    step, _, arrays = zoo.oracle("PureBF16")
    lost = total = 0
    for key in (k for k in arrays if k.startswith("before|")):
        site = key.removeprefix("before|")
        (row,) = of_site(zoo.rows("pure_bf16", step=step, kind="update"), f"update|{site}").to_dict("records")
        same = arrays[key] == arrays[f"after|{site}"]
        assert row["unchanged"] == same.sum()  # AdamW with decay moves every weight: all unchanged ones are lost
        assert sum(row["rel_hist"]) == row["numel"]
        lost, total = lost + same.sum(), total + same.size
    assert lost / total > 0.8
    assert zoo.steps("pure_bf16").loc[step, "lost_update_fraction"] == lost / total


@pytest.mark.parametrize("other", ["gpt_checkpoint", "gpt_checkpoint_reentrant"])
def test_a_checkpointed_model_has_the_rows_of_the_plain_one_counted_once(zoo, other):
    columns = ["step", "module", "kind", "name", "call", "phase", "numel", "amax", "sum", "zero", "fingerprint"]
    plain = zoo.rows("gpt")[columns].sort_values(columns[:5]).reset_index(drop=True)
    again = zoo.rows(other)[columns].sort_values(columns[:5]).reset_index(drop=True)
    assert plain.equals(again)


def test_accumulation_merges_activations_and_keeps_the_last_weight_gradient(zoo):
    rows = zoo.rows("gpt_accumulate", step=1, module="blocks.0.qkv")
    by_kind = {
        kind: row
        for kind, row in zip(rows["kind"], rows.to_dict("records"), strict=True)
        if row["name"] in ("", "weight")
    }
    assert by_kind["output"]["numel"] == by_kind["grad_output"]["numel"] == 4 * math.prod(by_kind["output"]["shape"])
    assert by_kind["weight_grad"]["numel"] == math.prod(by_kind["weight_grad"]["shape"])
    assert by_kind["weight_grad"]["micro_step"] == 3
    steps = zoo.steps("gpt_accumulate")
    assert steps["micro_steps"].tolist() == [4, 4, 4]
    assert steps["loss"].tolist() == pytest.approx(np.reshape(zoo.plain["gpt_accumulate"]["losses"], (3, 4)).sum(1))


def test_the_gradient_norm_is_the_one_before_clipping(zoo):
    _, _, arrays = zoo.oracle("GPT")
    local = math.sqrt(sum((v**2).sum() for k, v in arrays.items() if k.startswith("weight_grad|")))
    given = math.sqrt(sum((v**2).sum() for k, v in arrays.items() if k.startswith("weight_grad_step|")))
    row = zoo.steps("gpt_accumulate").loc[1]
    assert row["grad_norm"] == pytest.approx(local, rel=1e-6)
    assert row["clip_norm"] == 0.05
    assert given == pytest.approx(0.05, rel=1e-3) and local > 0.1


MASTERS = """
import torch
from torch import nn

net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)).half()
masters = [p.detach().float().requires_grad_() for p in net.parameters()]
optimizer = torch.optim.SGD(masters, lr=0.01)
for step in range(8):
    ((net(torch.randn(16, 8).half()).float() - 1).square().mean() * 1024.0).backward()
    for p, master in zip(net.parameters(), masters):
        master.grad, p.grad = p.grad.float() / 1024.0, None
    print(float(nn.utils.clip_grad_norm_(masters, 1e-3)))
    optimizer.step()
    with torch.no_grad():
        for p, master in zip(net.parameters(), masters):
            p.copy_(master)
"""


def test_the_gradient_norm_of_masters_is_the_one_before_clipping_on_every_step(tmp_path):
    done = record(tmp_path, "--every", "4", "--", *warm(script(tmp_path, "masters.py", MASTERS)))
    assert done.status == 0, done.err
    steps = precdoctor.open_run(done.run).steps()
    assert steps["sampled"].sum() == 2
    assert steps["grad_norm"].tolist() == pytest.approx([float(x) for x in done.out.split()], rel=1e-5)


def test_optimizer_state_is_that_of_the_parameters_and_comes_every_eighth_step(zoo):
    rows = zoo.rows("master_weights", kind="opt_state")
    assert set(rows["step"]) == {0, 8}
    named = {f"{module}.{name}" for module, name in zip(rows["module"], rows["name"], strict=True)}
    owners = {f"{layer}.{own}" for layer in ("fc1", "fc2") for own in ("weight", "bias")}
    assert named == {f"{owner}.{key}" for owner in owners for key in ("exp_avg", "exp_avg_sq")}
    first = rows[rows["step"] == 0].set_index(["module", "name"])["sum_sq"]
    given = zoo.rows("master_weights", kind="weight_grad_step", step=0).set_index(["module", "name"])["sum_sq"]
    for (module, name), squares in given.items():  # after one step from zero: 0.1 g
        assert first[module, f"{name}.exp_avg"] == pytest.approx(0.01 * squares, rel=1e-5)


def test_master_weights_go_by_the_name_of_their_weight_and_round_to_it(zoo):
    weights, masters = (zoo.rows("master_weights", kind=kind) for kind in ("weight", "master_weight"))
    assert set(weights["dtype"]) == {"bfloat16"} and set(masters["dtype"]) == {"float32"}
    key = ["step", "module", "name"]
    both = weights.merge(masters, on=key, suffixes=("", "_master"))
    assert len(both) == len(weights) == len(masters) == 4 * 10
    assert both["sum_sq"].to_numpy() == pytest.approx(both["sum_sq_master"].to_numpy(), rel=2**-7)
    updates = zoo.rows("master_weights", kind="update")
    assert set(updates["dtype"]) == {"float32"} and set(updates["root"]) == {"PureBF16#0"}


SAME = """
import torch
from torch import nn

net = nn.Linear(8, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x = torch.randn(4, 8)
for _ in range(6):
    net(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_one_batch_for_all_steps_has_a_row_in_each(tmp_path):
    done = record(tmp_path, "--every", "1", "--", *warm(script(tmp_path, "same.py", SAME)))
    assert done.status == 0, done.err
    rows = precdoctor.open_run(done.run).tensors()
    assert rows[rows["kind"] == "batch"]["step"].tolist() == list(range(6))
